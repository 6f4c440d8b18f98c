"""``python -m moriiod``: the same as the ``moriiod`` command."""

from __future__ import annotations

import sys

from moriiod.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
