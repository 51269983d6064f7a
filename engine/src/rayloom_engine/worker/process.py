"""A rank's process, `python -m rayloom_engine.worker.process`.

The process outlives a core that dies, and keeps its weights for the next core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rayloom_engine.common.process import end_with_parent, set_up_logging
from rayloom_engine.config import load_config
from rayloom_engine.worker.job import serve_in_job
from rayloom_engine.worker.rank_server import RankPlace, RankServer


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a rank until it ends. Returns the exit code. `arguments`: used instead of the command line's, if given."""
    parser = argparse.ArgumentParser(prog="python -m rayloom_engine.worker.process", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder with config.json and token")
    parser.add_argument("--core-address", required=True, help="HOST:PORT of the core's rank port")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="id of the process with which this one ends")
    args = parser.parse_args(arguments)
    end_with_parent(args.parent)
    config = load_config(args.run_dir / "config.json")
    set_up_logging(f"rank{args.rank}", config.log_level)
    if config.executor == "external":
        return serve_in_job(config)
    place = RankPlace(
        rank=args.rank,
        incarnation=args.incarnation,
        ranks_on_host=config.world_size,
        address=args.core_address,
        token=(args.run_dir / "token").read_text().strip(),
    )
    RankServer(config, place).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
