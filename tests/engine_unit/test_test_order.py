"""The order of the test files: the longest first, and files with a shared server one after the other."""

from __future__ import annotations

from rt_schedule import LISTED_S, SECONDS, longest_first, next_unit, seconds_on_file, starts_servers
from rt_shared import FILES

SERVER = sorted(f"tests/engine_real/{name}.py" for name in FILES["server"])


def order(files: list[str], listed: dict[str, float]) -> list[str]:
    nodeids = [f"{file}::test_{number}" for file in files for number in range(2)]
    ordered = [nodeids[index] for index in longest_first(nodeids, listed)]
    assert sorted(ordered) == sorted(nodeids)
    return [nodeid.partition("::")[0] for nodeid in ordered[::2]]


def test_the_longest_files_run_first_and_others_keep_their_order_at_the_end() -> None:
    files = ["z.py", "a.py", "long.py", "longer.py"]
    assert order(files, {"long.py": 3.0, "longer.py": 4.0}) == ["longer.py", "long.py", "z.py", "a.py"]


def test_files_with_one_server_follow_one_another_by_their_common_seconds() -> None:
    first, second = SERVER[:2]
    files = [first, "long.py", second, "longer.py"]
    listed = {first: 2.0, second: 3.0, "long.py": 4.0, "longer.py": 6.0}
    assert order(files, listed) == ["longer.py", first, second, "long.py"]


def test_at_most_two_processes_run_tests_with_servers_while_other_tests_wait() -> None:
    real, other, page = "tests/engine_real/test_page.py", "tests/engine_unit/test_ranks.py", "tests/docs/test_blocks.py"
    assert list(map(starts_servers, ["server", real, page, other])) == [True, True, True, False]
    assert next_unit([real, other], running=["server"]) == real
    assert next_unit([real, other], running=["server", page]) == other
    assert next_unit([other, real], running=[]) == other
    assert next_unit([real], running=["server", page]) == real, "no other test is left"


def test_the_listed_files_are_there() -> None:
    root = SECONDS.parents[2]
    assert [file for file in seconds_on_file() if not (root / file).exists()] == []
    assert min(seconds_on_file().values()) >= LISTED_S
