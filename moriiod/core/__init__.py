"""The pure core: events in, effects out. No sockets, clocks, threads, torch or pydantic.

``core.machine.Machine.step(event, now) -> effects`` is the only way to change state.
"""
