"""PUT /adapters at the admin port: the front applies the whole list, and reports it in /status and to the core."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayloom_engine.config import parse_config
from rayloom_engine.core.adapter import NeededAdapter
from rayloom_engine.errors import ConfigError
from rayloom_engine.front.operations import adapters as adapters_module
from rayloom_engine.front.operations.adapters import AdapterList
from rayloom_engine.front.operations.rank_files import RankFiles
from rayloom_engine.front.operations.service import Waits
from rt_front import FrontUnderTest, running_front
from rt_peft_files import write_tiny_adapter, write_tiny_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_config(tmp_path / "model")
    for number, name in enumerate(("sql", "poems", "later")):
        write_tiny_adapter(tmp_path / name, seed=number)
    return tmp_path


@pytest.fixture
def front(folder: Path) -> Iterator[FrontUnderTest]:
    first = [f"sql={folder / 'sql'}", f"lost={folder / 'lost'}"]
    with running_front(folder, managed_adapters=True, adapters=first) as running:
        yield running


def put(front: FrontUnderTest, adapters: Any) -> Any:
    return front.admin.put("/adapters", json={"adapters": adapters})


def states(front: FrontUnderTest) -> dict[str, str]:
    return {each["name"]: each["state"] for each in front.admin.get("/status").json()["adapters"]}


def served(front: FrontUnderTest) -> list[str]:
    return [card["id"] for card in front.http.get("/v1/models").json()["data"]]


def told(front: FrontUnderTest) -> list[str]:
    """The adapters that the core reports to gateways."""
    return [each.name for each in front.core.adapters or ()]


def wait_for(front: FrontUnderTest, expected: dict[str, str]) -> None:
    managed = front.service.managed_adapters
    assert managed is not None
    front.wait_until(lambda: {each.name: each.state for each in managed.reports()} == expected, str(expected))


def test_a_server_starts_with_the_adapters_of_its_config_and_reports_one_that_cannot_be_loaded(
    front: FrontUnderTest, folder: Path
) -> None:
    assert served(front) == ["tiny", "sql"]
    reports = front.admin.get("/status", headers={"Prefer": "return=minimal"}).json()["adapters"]
    loaded = {"name": "sql", "path": str(folder / "sql"), "state": "loaded", "message": "", "commit": ""}
    assert reports[0] == loaded
    assert (reports[1]["name"], reports[1]["state"]) == ("lost", "failed")
    assert "adapter_config.json does not exist" in reports[1]["message"]
    front.wait_until(lambda: told(front) == ["sql"], "the core knows the adapter")


@pytest.mark.parametrize("is_managed", [True, False])
def test_a_start_sends_the_core_no_incomplete_list(folder: Path, is_managed: bool) -> None:
    both = [f"{name}={folder / name}" for name in ("sql", "poems")]
    with running_front(folder, managed_adapters=is_managed, adapters=both) as front:
        front.wait_until(lambda: bool(front.core.adapter_lists), "the core knows the adapters")
        assert [entry.name for entry in front.core.adapter_lists[0]] == ["sql", "poems"]


def test_a_start_tries_each_adapter_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    real = AdapterList.load

    async def load(self: AdapterList, name: str, *arguments: Any, **settings: Any) -> None:
        tried.append(name)
        await real(self, name, *arguments, **settings)

    monkeypatch.setattr(AdapterList, "load", load)
    lost, poems = str(folder / "lost"), str(folder / "poems")
    with running_front(folder, managed_adapters=True, adapters=[f"lost={lost}"]) as front:
        put(front, {"lost": lost, "poems": poems})
        wait_for(front, {"lost": "failed", "poems": "loaded"})
    assert tried == ["lost", "lost", "poems"], "once at the start, and once for the new list"


def test_the_admin_port_replaces_the_list(front: FrontUnderTest, folder: Path) -> None:
    answer = put(front, {"sql": str(folder / "sql"), "poems": f"file://{folder / 'poems'}"})
    assert answer.status_code == 202
    assert [each["name"] for each in answer.json()["adapters"]] == ["sql", "poems"]
    wait_for(front, {"sql": "loaded", "poems": "loaded"})
    assert served(front) == ["tiny", "sql", "poems"]
    put(front, {"poems": str(folder / "later")})
    wait_for(front, {"poems": "loaded"})
    assert front.http.get("/v1/models/poems").json()["root"] == str(folder / "later")
    assert served(front) == ["tiny", "poems"]
    front.wait_until(lambda: told(front) == ["poems"], "the core knows the adapter")
    put(front, {})
    wait_for(front, {})
    assert served(front) == ["tiny"]


def test_an_adapter_whose_files_arrive_later_is_loaded_then(folder: Path) -> None:
    hidden = folder / "later"
    shutil.move(hidden, folder / "hidden")
    with running_front(folder, managed_adapters=True, waits=Waits(adapters_s=0.02)) as front:
        put(front, {"later": str(hidden)})
        wait_for(front, {"later": "failed"})
        shutil.move(folder / "hidden", hidden)
        wait_for(front, {"later": "loaded"})
        assert states(front) == {"later": "loaded"}
        put(front, {"later": str(folder / "absent")})
        wait_for(front, {"later": "failed"})
        assert front.http.get("/v1/models/later").json()["root"] == str(hidden), "the earlier files stay"


def test_the_next_front_has_the_list_that_the_admin_port_has_set(folder: Path) -> None:
    kept = {"managed_adapters": True, "adapters": [f"sql={folder / 'sql'}"], "adapters_file": folder / "kept.json"}
    with running_front(folder, **kept) as front:
        assert served(front) == ["tiny", "sql"]
        put(front, {"poems": str(folder / "poems")})
        wait_for(front, {"poems": "loaded"})
    with running_front(folder, start=2, **kept) as front:
        assert served(front) == ["tiny", "poems"]
        wait_for(front, {"poems": "loaded"})
        put(front, {})
        front.wait_until(lambda: (folder / "kept-wanted.json").read_bytes() == b"{}", "the list is kept")
    with running_front(folder, start=3, **kept) as front:
        front.wait_until(lambda: front.service.adapter_list.entries == [], "no adapter")
        assert served(front) == ["tiny"]


def test_the_next_front_still_wants_adapters_that_could_not_be_loaded(folder: Path) -> None:
    kept = {"managed_adapters": True, "adapters_file": folder / "kept.json"}
    wanted = {"poems": str(folder / "poems"), "absent": str(folder / "absent")}
    with running_front(folder, **kept) as front:
        put(front, wanted)
        wait_for(front, {"poems": "loaded", "absent": "failed"})
    with running_front(folder, start=2, **kept) as front:
        wait_for(front, {"poems": "loaded", "absent": "failed"})


def test_of_loads_that_run_beside_each_other_only_as_many_succeed_as_there_is_room_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "MOST_ADAPTERS", 1)
    lists: list[tuple[NeededAdapter, ...]] = []
    adapters = AdapterList(parse_config({"model": str(folder / "model")}), ranks=RankFiles(lists.append))

    async def load_both() -> list[BaseException | None]:
        loads = (adapters.load(name, str(folder / name), folder / "model", in_place=False) for name in ("sql", "poems"))
        return await asyncio.gather(*loads, return_exceptions=True)

    failures = [failure for failure in asyncio.run(load_both()) if failure is not None]
    assert [str(failure) for failure in failures] == [
        "there are 1 adapters already, which is the most; unload one first"
    ]
    assert len(adapters.entries) == 1
    assert lists == [()], "folders need no fetched files"


class SlowLoad:
    """Replaces AdapterList.load. Like one from a slow hub, the adapter "slow" is loaded late: after `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_over = threading.Event()
        real = AdapterList.load

        async def load(adapters: AdapterList, name: str, *arguments: Any, **settings: Any) -> None:
            if name == "slow":
                await asyncio.to_thread(self._is_over.wait, 60.0)
            await real(adapters, name, *arguments, **settings)

        monkeypatch.setattr(AdapterList, "load", load)

    def release(self) -> None:
        self._is_over.set()


@pytest.mark.parametrize("start", [1, 2])
def test_a_slow_adapter_delays_neither_the_start_nor_a_restart(
    folder: Path, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    slow = SlowLoad(monkeypatch)
    if start == 1:
        waits = Waits(adapters_at_start_s=0.05, adapters_at_restart_s=600.0)
    else:
        waits = Waits(adapters_at_start_s=600.0, adapters_at_restart_s=0.05)
    wanted = [f"slow={folder / 'poems'}"]
    with running_front(folder, managed_adapters=True, adapters=wanted, waits=waits, start=start) as front:
        try:
            assert states(front) == {"slow": "loading"}
            assert served(front) == ["tiny"]
            front.wait_until(lambda: front.core.adapters == (), "the core has the list")
        finally:
            slow.release()
        wait_for(front, {"slow": "loaded"})
        assert served(front) == ["tiny", "slow"]
        front.wait_until(lambda: told(front) == ["slow"], "the core knows the adapter")


def test_a_fault_of_one_attempt_does_not_end_the_later_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, faults = AdapterList.unload, [OSError("no space left"), ValueError("unforeseen")]

    async def unload(self: AdapterList, name: str) -> None:
        if faults:
            raise faults.pop()
        await real(self, name)

    monkeypatch.setattr(AdapterList, "unload", unload)
    first = [f"sql={folder / 'sql'}"]
    with running_front(folder, managed_adapters=True, adapters=first, waits=Waits(adapters_s=0.02)) as front:
        put(front, {"poems": str(folder / "poems")})
        wait_for(front, {"poems": "loaded"})
        assert served(front) == ["tiny", "poems"]
    assert faults == []
    assert caplog.text.count("cannot bring the adapters to the wanted list") == 2


def test_an_adapter_in_the_home_of_an_unknown_user_is_reported(front: FrontUnderTest, folder: Path) -> None:
    managed = front.service.managed_adapters
    assert managed is not None
    front.do(lambda: managed.want({"sql": "~no-such-user/y"}))
    wait_for(front, {"sql": "failed"})
    put(front, {"sql": str(folder / "sql")})
    wait_for(front, {"sql": "loaded"})


def test_a_wrong_list_is_refused_and_changes_nothing(front: FrontUnderTest) -> None:
    answer = put(front, {"x": "~nobody/y"})
    assert answer.status_code == 400
    assert '"x": "~nobody/y" is not an absolute path' in answer.json()["error"]["message"]
    for body in ({"adapters": [1]}, {"adapter": {}}, {"adapters": {"a": 1}}):
        answer = front.admin.put("/adapters", json=body)
        assert answer.status_code == 400
        assert 'send {"adapters": {"NAME": "/FOLDER"}}' in answer.json()["error"]["message"]
    assert front.admin.put("/adapters", content=b"{").status_code == 400
    answer = put(front, {str(number): "/x" for number in range(1025)})
    assert (answer.status_code, "at most 1024" in answer.text) == (400, True)
    assert served(front) == ["tiny", "sql"]


def test_clients_cannot_change_managed_adapters(front: FrontUnderTest, folder: Path) -> None:
    load = {"lora_name": "poems", "lora_path": str(folder / "poems")}
    answer = front.http.post("/v1/load_lora_adapter", json=load)
    assert answer.status_code == 403
    assert "only the admin port changes the adapters of this server (managed_adapters)" in answer.text


def test_an_engine_without_managed_adapters_takes_no_list(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        answer = put(front, {})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "adapters_fixed")
        assert front.admin.get("/status").json()["adapters"] is None
    with pytest.raises(ConfigError, match="remove one of the two"):
        parse_config({"managed_adapters": True, "allow_runtime_lora_updating": True})
