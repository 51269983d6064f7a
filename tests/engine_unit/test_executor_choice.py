"""The choice of the executor from a config and an environment, and the faults of a job's environment."""

from __future__ import annotations

import pytest

from rayloom_engine.config import parse_config
from rayloom_engine.errors import ConfigError
from rayloom_engine.executor_choice import choose_executor, job_place

JOB = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
    "RAYLOOM_RANK_TOKEN": "x" * 32,
}
FOUR = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("document", "environ", "name", "reason"),
    [
        ({}, {}, "uni", "one rank"),
        (FOUR, {}, "mp", "4 ranks on this machine"),
        ({**FOUR, "ray_address": "h:1"}, JOB, "ray", "ray_address is set"),
        ({**FOUR, "executor": "mp"}, JOB, "mp", "set"),
        (FOUR, JOB, "external", "this is rank 3 of a job of 4"),
        ({"tensor_parallel_size": 2}, JOB, "mp", "2 ranks on this machine"),
        ({}, {**JOB, "WORLD_SIZE": "1"}, "uni", "one rank"),
        (FOUR, {"RAY_ADDRESS": "h:1"}, "ray", "RAY_ADDRESS is set"),
        ({}, {"RAY_ADDRESS": "h:1"}, "uni", "one rank"),
    ],
)
def test_a_setting_wins_over_the_environment_and_that_over_the_size(
    document: dict[str, object], environ: dict[str, str], name: str, reason: str
) -> None:
    choice = choose_executor(parse_config(document), environ)
    assert (choice.name, choice.reason) == (name, reason)


def test_a_job_of_several_machines_meets_at_the_port_after_the_masters() -> None:
    place = job_place(parse_config({**FOUR, "executor": "external"}), JOB)
    assert (place.rank, place.local_rank, place.ranks_on_host, place.address) == (3, 1, 2, "head:29501")
    assert not place.is_on_one_host
    assert place.token not in repr(place)


def test_a_job_on_one_machine_stays_on_it() -> None:
    config = parse_config({**FOUR, "executor": "external", "rank_port": 7000})
    place = job_place(config, {**JOB, "LOCAL_WORLD_SIZE": "4"})
    assert (place.address, place.port, place.is_on_one_host) == ("127.0.0.1:7000", 7000, True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"RANK": "", "MASTER_ADDR": ""}, "needs RANK, MASTER_ADDR in the environment; start it with torchrun"),
        ({"RANK": "one"}, "is no number: .*'one'"),
        ({"WORLD_SIZE": "3"}, "WORLD_SIZE 3, but tensor_parallel_size 2 x pipeline_parallel_size 2 needs 4 ranks"),
        (
            {"LOCAL_WORLD_SIZE": "5"},
            "LOCAL_RANK 1 and LOCAL_WORLD_SIZE 5 cannot be in a job of WORLD_SIZE 4; use LOCAL_RANK < LOCAL_WORLD_SIZE",
        ),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK 2 and LOCAL_WORLD_SIZE 2 cannot be in a job of WORLD_SIZE 4"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK -1 and LOCAL_WORLD_SIZE 2 cannot be"),
        ({"RAYLOOM_RANK_TOKEN": "short"}, r"RAYLOOM_RANK_TOKEN=\$\(openssl rand -hex 32\)"),
        ({"MASTER_PORT": "65535"}, "MASTER_PORT 65535 has no next port; set rank_port"),
    ],
)
def test_a_jobs_environment_that_cannot_be_used_is_refused(changes: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        job_place(parse_config({**FOUR, "executor": "external"}), {**JOB, **changes})
