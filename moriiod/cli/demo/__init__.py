"""``moriiod demo``: daemons and workers of two instances on this machine, every byte checked.

Only ``cache``, ``worker`` and ``zygote`` import torch; the command itself never does. See
``docs/demo.md``.
"""

from moriiod.cli.demo.command import demo

__all__ = ["demo"]
