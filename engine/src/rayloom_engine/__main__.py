"""`rayloom-engine` and `python -m rayloom_engine`."""

from __future__ import annotations

import sys

from rayloom_engine.cli.commands import run


def main() -> int:
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
