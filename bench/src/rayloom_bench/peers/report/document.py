"""The result of `bench peers` as a JSON document. Pure."""

from __future__ import annotations

import dataclasses

from rayloom_bench.peers.report.goals import goals, peer_checks
from rayloom_bench.peers.result import PeersResult, Turn


def document(result: PeersResult) -> dict[str, object]:
    """The whole result without the times of single tokens, ready for json.dumps."""
    return {
        "version": 1,
        **result.about,
        "engines": {name: dataclasses.asdict(facts) for name, facts in result.engines.items()},
        "workloads": [dataclasses.asdict(workload) for workload in (*result.workloads, *result.sweeps)],
        "machine_rates": None if result.rates is None else dataclasses.asdict(result.rates),
        "model_cost": None if result.cost is None else dataclasses.asdict(result.cost),
        "turns": [_turn(turn) for turn in (*result.turns, *result.sweep_turns)],
        "agreements": {engine: dataclasses.asdict(found) for engine, found in result.agreements.items()},
        "goals": [dataclasses.asdict(goal) for goal in (*goals(result), *peer_checks(result))],
        "failures": [dataclasses.asdict(failure) for failure in result.failures],
    }


def _turn(turn: Turn) -> dict[str, object]:
    return {
        "engine": turn.engine,
        "round": turn.round_number,  # number 0 has the sweeps
        "start_to_first_token_s": turn.start_to_first_token_s,
        "pss_bytes": dict(turn.pss_bytes),
        "pss_bytes_after": {workload: dict(sizes) for workload, sizes in turn.pss_after.items()},
        "neighbour": None if turn.neighbour is None else dataclasses.asdict(turn.neighbour),
        "others_percent": turn.others_percent,
        "figures": {workload: dataclasses.asdict(figures) for workload, figures in turn.figures.items()},
    }
