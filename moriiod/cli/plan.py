"""``moriiod plan``: who would read what from whom, before anything is deployed."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from moriiod.cli.models import (
    LAYOUTS,
    MODELS,
    LayoutChoice,
    Model,
    OrderChoice,
    attention,
    find_model,
    latent,
)
from moriiod.cli.preview import Instance, Preview, make_preview
from moriiod.core.headplan import HeadSlice
from moriiod.core.settings import CoreSettings

_MIB: Final = 1 << 20
_PIPE_WIDTH: Final = 140
_MAX_TOKEN_SPANS: Final = CoreSettings().max_token_spans
_SIZE: Final = {"min": 1, "max": 1024, "metavar": "N"}


def plan(  # noqa: PLR0913 - one argument for each option
    prefill_tp: Annotated[int, typer.Option(help="TP size of the prefill instance.", **_SIZE)],
    decode_tp: Annotated[int, typer.Option(help="TP size of the decode instance.", **_SIZE)],
    kv_heads: Annotated[
        int, typer.Option(min=0, max=65536, metavar="N", help="KV heads of the model; 0 = MLA.")
    ] = 8,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"A known model instead of --kv-heads and what follows: {', '.join(MODELS)}.",
        ),
    ] = None,
    layout: Annotated[
        LayoutChoice, typer.Option(help="Where K and V lie in a layer's tensor.")
    ] = LayoutChoice.KV_FIRST,
    head_order: Annotated[
        OrderChoice, typer.Option(help="Heads outermost in a block, or tokens.")
    ] = OrderChoice.HND,
    layers: Annotated[int, typer.Option(min=1, max=4096, metavar="N", help="Layers.")] = 61,
    head_size: Annotated[
        int, typer.Option(min=1, max=65536, metavar="N", help="Elements of a head, 2 bytes each.")
    ] = 128,
    tokens: Annotated[
        int, typer.Option(min=1, max=1 << 24, metavar="N", help="Length of the prompt.")
    ] = 4096,
    block_tokens: Annotated[
        int, typer.Option(min=1, max=65536, metavar="N", help="Tokens in a block.")
    ] = 16,
    decode_block_tokens: Annotated[
        int, typer.Option(min=0, max=65536, metavar="N", help="The same on decode; 0 = equal.")
    ] = 0,
    kernel_tokens: Annotated[
        int,
        typer.Option(min=0, max=65536, metavar="N", help="Tokens in a kernel block; 0 = equal."),
    ] = 0,
    decode_kernel_tokens: Annotated[
        int, typer.Option(min=0, max=65536, metavar="N", help="The same on decode; 0 = equal.")
    ] = 0,
    allow_uneven: Annotated[
        bool, typer.Option("--allow-uneven", help="As topology.allow_uneven on both sides.")
    ] = False,
    max_token_spans: Annotated[
        int, typer.Option(min=0, metavar="N", help="As limits.max_token_spans; 0 = no limit.")
    ] = _MAX_TOKEN_SPANS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print which heads every decode rank would take from which prefill rank, and what it costs.

    Needs no daemon. What the pair cannot do is refused with the error a transfer would end with.
    """
    if model is not None:
        chosen = find_model(model)
    elif kv_heads == 0 or layout is LayoutChoice.MLA:
        chosen = Model("mla", (latent(layers),))
    else:
        group = attention(
            kv_heads,
            layers=layers,
            head_size=head_size,
            layout=LAYOUTS[layout],
            head_order="HND" if head_order is OrderChoice.HND else "NHD",
        )
        chosen = Model(f"{kv_heads} KV heads", (group,))
    sides = (
        Instance(prefill_tp, block_tokens, kernel_tokens),
        Instance(decode_tp, decode_block_tokens or block_tokens, decode_kernel_tokens),
    )
    found = make_preview(
        chosen, sides, tokens, allows_uneven=allow_uneven, max_token_spans=max_token_spans
    )
    if as_json:
        typer.echo(json.dumps(preview_document(found), indent=2))
        return
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    print_preview(found, Console(width=width, highlight=False))


def print_preview(preview: Preview, console: Console) -> None:
    """Print the head slices, the ACK sets and the cost."""
    heads = preview.heads
    console.print(
        f"{preview.model.name}: prefill TP {heads.producer_tp} -> decode TP {heads.consumer_tp}, "
        f"a prompt of {preview.tokens} tokens"
    )
    console.print()
    console.print(slice_table(preview))
    console.print()
    console.print(ack_table(preview))
    costs = preview.costs.values()
    console.print(
        f"\nin all {_size(sum(cost.n_bytes for cost in costs))} in "
        f"{sum(cost.descriptors for cost in costs)} descriptors, where no two blocks are "
        f"neighbours; {sum(cost.token_descriptors for cost in costs)} of them hold one token each"
    )


def slice_table(preview: Preview) -> Table:
    """Return which heads of each group a decode rank takes from which prefill rank."""
    table = _table("decode rank", "group", "own heads", "from", "bytes", "descriptors")
    for rank in range(preview.heads.consumer_tp):
        first = True
        for source in preview.heads.sources(rank):
            cost = preview.costs[source, rank]
            sums = (_size(cost.n_bytes), str(cost.descriptors))
            for name, one in preview.slices(rank):
                if one.producer_rank == source:
                    here, there = _runs(preview, name, rank, one)
                    table.add_row(str(rank) if first else "", name, here, there, *sums)
                    first, sums = False, ("", "")
    return table


def ack_table(preview: Preview) -> Table:
    """Return whose ACKs free each prefill rank."""
    table = _table("prefill rank", "read by", "freed by the ACKs of")
    for rank in range(preview.heads.producer_tp):
        readers = sorted(preview.heads.readers(rank))
        acks = sorted(preview.heads.ack_set(rank))
        table.add_row(
            str(rank), ", ".join(map(str, readers)) or "nobody", ", ".join(map(str, acks))
        )
    return table


def preview_document(preview: Preview) -> dict[str, Any]:
    """Return the same as plain values."""
    heads = preview.heads
    return {
        "model": preview.model.name,
        "prefill_tp": heads.producer_tp,
        "decode_tp": heads.consumer_tp,
        "tokens": preview.tokens,
        "groups": [
            {
                "name": group.name,
                "layout": group.layout,
                "head_order": group.head_order,
                "kv_heads": group.heads,
                "is_replicated": group.shape.is_replicated,
                "layers": group.layers,
            }
            for group in preview.model.groups
        ],
        "rank_map": [list(heads.sources(rank)) for rank in range(heads.consumer_tp)],
        "decode_ranks": [_decode_document(preview, rank) for rank in range(heads.consumer_tp)],
        "prefill_ranks": [
            {
                "rank": rank,
                "read_by": sorted(heads.readers(rank)),
                "ack_set": sorted(heads.ack_set(rank)),
            }
            for rank in range(heads.producer_tp)
        ],
        "bytes": sum(cost.n_bytes for cost in preview.costs.values()),
        "descriptors": sum(cost.descriptors for cost in preview.costs.values()),
        "token_descriptors": sum(cost.token_descriptors for cost in preview.costs.values()),
    }


def _decode_document(preview: Preview, rank: int) -> dict[str, Any]:
    sources = []
    for source in preview.heads.sources(rank):
        cost = preview.costs[source, rank]
        sources.append(
            {
                "prefill_rank": source,
                "slices": [
                    {
                        "group": name,
                        "prefill_head": one.producer_head,
                        "decode_head": one.consumer_head,
                        "count": one.count,
                    }
                    for name, one in preview.slices(rank)
                    if one.producer_rank == source
                ],
                "bytes": cost.n_bytes,
                "descriptors": cost.descriptors,
                "token_descriptors": cost.token_descriptors,
            }
        )
    return {"rank": rank, "sources": sources}


def _runs(preview: Preview, name: str, rank: int, one: HeadSlice) -> tuple[str, str]:
    """Name the heads of a slice by their number in the model, and where they come from."""
    group = next(group for group in preview.model.groups if group.name == name)
    if group.shape.is_replicated:
        return "all", f"P{one.producer_rank}"
    first = one.consumer_head
    if group.heads % preview.heads.consumer_tp == 0 or preview.heads.consumer_tp % group.heads == 0:
        first += group.shape.heads_of_rank(rank, preview.heads.consumer_tp).start
    last = first + one.count - 1
    here = f"{first}" if one.count == 1 else f"{first}..{last}"
    end = one.producer_head + one.count - 1
    there = f"{one.producer_head}" if one.count == 1 else f"{one.producer_head}..{end}"
    return here, f"P{one.producer_rank} (its {there})"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        is_number = name in ("bytes", "descriptors")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    return table


def _size(n_bytes: int) -> str:
    return f"{n_bytes / _MIB:.1f} MiB" if n_bytes >= _MIB else f"{n_bytes} B"
