"""`python -m rayloom_engine.front`: the API server process, see process.py."""

from __future__ import annotations

import sys

from rayloom_engine.common.process import without_garbage_collection

if __name__ == "__main__":
    # Objects created by imports are never garbage. Garbage collections would take a fifth of the imports' time and
    # free nothing.
    with without_garbage_collection():
        from rayloom_engine.front.process import main
    sys.exit(main())
