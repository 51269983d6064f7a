"""The entry of `rayloom-engine` and of `python -m rayloom_engine`."""

from __future__ import annotations

import sys

from rayloom_engine.supervisor.prepared import prepared_core


def main() -> int:
    arguments = sys.argv[1:]
    core = prepared_core(arguments)
    try:
        # Imported only after the server's core has started, so that the imports of both processes run in parallel.
        from rayloom_engine.cli.commands import run

        return run(arguments, core)
    finally:
        if core is not None:
            core.discard()


if __name__ == "__main__":
    sys.exit(main())
