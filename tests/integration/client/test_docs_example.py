"""The example of docs/client.md does what it says."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

from tests.support.daemons import address_of, running_daemon

ROOT = Path(__file__).parents[3]


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs/client.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


async def test_example_prints_what_the_page_shows(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(blocks("python")[0], encoding="utf-8")
    async with (
        running_daemon(tmp_path / "p") as prefill,
        running_daemon(tmp_path / "d") as decode,
    ):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(script),
            prefill.config.socket_path,
            str(address_of(prefill).base_port),
            decode.config.socket_path,
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
    assert process.returncode == 0
    assert out.decode() == blocks("text")[0]
