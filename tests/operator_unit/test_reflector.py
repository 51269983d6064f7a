"""The reflector with a fake watch: its copies after a watch that broke, and its delays between requests."""

import asyncio
import contextlib

import pytest

from rayloom_operator.kube import reflector, shapes
from rayloom_operator.kube.client import KubeError
from rayloom_operator.kube.reflector import Reflector, Watched
from rt_fake_kube import FakeKube


def pod(name, service="chat", namespace="team"):
    meta = {"name": name, "namespace": namespace, "labels": {"rayloom.dev/service": service}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta}


@contextlib.asynccontextmanager
async def reflecting(kube, changes=None, namespaces=(), **watched):
    pods = Watched(api_version="v1", kind="Pod", **watched)
    found = Reflector(kube, pods, (changes if changes is not None else []).append, namespaces=namespaces)
    task = asyncio.create_task(found.run())
    try:
        async with asyncio.timeout(60):
            await found.is_synced.wait()
            yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def names(found, key=("team", "chat")):
    return [each["metadata"]["name"] for each in found.of_service(key)]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_it_follows_objects_that_are_created_and_deleted():
    async def run():
        kube, changes = FakeKube(), []
        kube.put(pod("a"))
        async with reflecting(kube, changes) as found:
            await until(lambda: kube._watches)
            kube.put(pod("b"))
            kube.put(pod("c", "other"))
            await until(lambda: names(found) == ["a", "b"] and names(found, ("team", "other")) == ["c"])
            kube.remove("/api/v1/namespaces/team/pods/a")
            await until(lambda: names(found) == ["b"])
            assert changes == [("team", "chat"), ("team", "chat"), ("team", "other"), ("team", "chat")]

    asyncio.run(run())


def test_an_object_deleted_while_the_watch_was_too_old_is_reported(monkeypatch):
    monkeypatch.setattr(reflector, "_FIRST_DELAY_S", 0.001)

    async def run():
        kube, changes = FakeKube(), []
        kube.put(pod("a"))
        kube.put(pod("b"))
        breaks = asyncio.Event()
        real = kube.watch

        async def watch(path, params, version, shape):
            if not breaks.is_set():
                await breaks.wait()
                raise KubeError(410, "too old resource version")
            async for each in real(path, params, version, shape):
                yield each

        kube.watch = watch
        async with reflecting(kube, changes) as found:
            changes.clear()
            del kube.objects["/api/v1/namespaces/team/pods/a"]
            breaks.set()
            await until(lambda: names(found) == ["b"])
            assert ("team", "chat") in changes

    asyncio.run(run())


def test_of_several_namespaces_it_follows_these_alone():
    async def run():
        kube, changes = FakeKube(), []
        for namespace in ("team", "other", "third"):
            kube.put(pod("a", namespace=namespace))
        async with reflecting(kube, changes, namespaces=("team", "other")) as found:
            await until(lambda: len(kube._watches) == 2)
            assert sorted(changes) == [("other", "chat"), ("team", "chat")]
            kube.put(pod("b", namespace="other"))
            kube.put(pod("b", namespace="third"))
            await until(lambda: names(found, ("other", "chat")) == ["a", "b"])
            assert (names(found), names(found, ("third", "chat"))) == (["a"], [])

    asyncio.run(run())


def test_a_list_of_one_namespace_drops_nothing_of_another(monkeypatch):
    monkeypatch.setattr(reflector, "_FIRST_DELAY_S", 0.001)

    async def run():
        kube = FakeKube()
        for namespace in ("team", "other"):
            kube.put(pod("a", namespace=namespace))
        async with reflecting(kube, namespaces=("team", "other")) as found:
            await until(lambda: len(kube._watches) == 2)
            del kube.objects["/api/v1/namespaces/team/pods/a"]
            kube.end_watches("/team/pods", KubeError(410, "too old resource version"))
            await until(lambda: names(found) == [])
            assert names(found, ("other", "chat")) == ["a"]

    asyncio.run(run())


def test_it_keeps_the_copies_of_a_kind_that_is_gone_and_is_not_synced(monkeypatch):
    monkeypatch.setattr(reflector, "_UNKNOWN_DELAY_S", 0.001)

    async def run():
        kube = FakeKube()
        kube.put(pod("a"))
        async with reflecting(kube) as found:
            await until(lambda: kube._watches)
            kube.refusals["list", "/pods"] = KubeError(404, "not found")
            kube.end_watches("/pods", KubeError(404, "not found"))
            await until(lambda: not found.is_synced.is_set())
            assert names(found) == ["a"]
            del kube.objects["/api/v1/namespaces/team/pods/a"]
            kube.refusals.clear()
            await found.is_synced.wait()
            assert names(found) == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("is_optional", "delays"),
    [(False, [2, 2, 2, 2, 2, 2, 2, 2, 2]), (True, [2, 4, 8, 16, 32, 60, 60, 2, 4])],
)
def test_an_optional_kind_that_is_unknown_is_listed_ever_more_rarely(monkeypatch, is_optional, delays):
    missing, found_delays = KubeError(404, "not found"), []

    async def run():
        kube, enough = FakeKube(), asyncio.Event()
        kube.refusals["list", "/pods"] = missing

        async def wait(self, seconds):
            found_delays.append(seconds)
            if len(found_delays) == 7:
                kube.refusals.clear()  # the kind is installed, and removed again
            if len(found_delays) == 9:
                enough.set()
            await asyncio.sleep(0)

        monkeypatch.setattr(Reflector, "_wait_for_kind", wait)
        async with reflecting(kube, is_optional=is_optional):
            await until(lambda: kube._watches)
            kube.refusals["list", "/pods"] = missing
            kube.end_watches("/pods", missing)
            await enough.wait()

    asyncio.run(run())
    assert found_delays[:9] == delays


def test_a_retry_lists_an_unknown_kind_at_once_but_not_again_and_again(monkeypatch):
    monkeypatch.setattr(reflector, "_UNKNOWN_DELAY_S", 1000.0)

    async def run():
        kube = FakeKube()
        kube.refusals["list", "/pods"] = KubeError(404, "not found")
        pods = Watched(api_version="v1", kind="Pod", is_optional=True)
        found = Reflector(kube, pods, lambda _: None)
        task = asyncio.create_task(found.run())
        async with asyncio.timeout(60):
            await found.has_answered.wait()
            for _ in range(3):
                found.retry()
                await asyncio.sleep(0)
            assert len(kube.lists) == 1
            kube.refusals.clear()
            found._alive_at["/api/v1/pods"] -= 1000.0
            found.retry()
            await found.is_synced.wait()
        assert len(kube.lists) == 2
        task.cancel()

    asyncio.run(run())


def test_a_cancellation_at_the_moment_of_a_retry_ends_the_wait():
    async def run():
        found = Reflector(FakeKube(), Watched(api_version="v1", kind="Pod", is_optional=True), lambda _: None)
        waiting = asyncio.create_task(found._wait_for_kind(1000.0))
        await asyncio.sleep(0)
        found.retry()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())


def test_its_silence_grows_and_ends_with_an_event():
    async def run():
        kube = FakeKube()
        async with reflecting(kube) as found:
            await until(lambda: kube._watches)
            now = asyncio.get_running_loop().time()
            assert 100 <= found.silence_seconds(now + 100) < 200
            found._alive_at["/api/v1/pods"] -= 1000
            assert found.silence_seconds(now) > 900
            kube.put(pod("a"))
            await until(lambda: names(found) == ["a"])
            assert found.silence_seconds(now) < 100

    asyncio.run(run())


def test_a_slow_list_before_a_watch_that_ends_at_once_is_no_watch_that_lived(monkeypatch):
    delays = []

    async def run():
        kube, loop, real_sleep = FakeKube(), asyncio.get_running_loop(), asyncio.sleep
        enough = asyncio.Event()
        real_time, real_list, slow = loop.time, kube.list, [0.0]

        async def listed(path, params):
            slow[0] += 1.5
            return await real_list(path, params)

        async def watch(path, params, version, shape):
            raise KubeError(410, "too old resource version")
            yield

        async def sleep(seconds):
            delays.append(seconds)
            if len(delays) == 3:
                enough.set()
            await real_sleep(0)

        kube.list, kube.watch = listed, watch
        monkeypatch.setattr(loop, "time", lambda: real_time() + slow[0])
        monkeypatch.setattr(reflector.asyncio, "sleep", sleep)
        async with reflecting(kube):
            await enough.wait()

    asyncio.run(run())
    assert delays[:3] == [0.5, 1.0, 2.0]


def test_the_delay_doubles_while_watches_end_at_once(monkeypatch):
    delays = []

    async def run():
        kube = FakeKube()
        enough = asyncio.Event()
        real_sleep = asyncio.sleep

        async def watch(path, params, version, shape):
            raise KubeError(410, "too old resource version")
            yield

        async def sleep(seconds):
            delays.append(seconds)
            if len(delays) == 8:
                enough.set()
            await real_sleep(0)

        kube.watch = watch
        monkeypatch.setattr(reflector.asyncio, "sleep", sleep)
        async with reflecting(kube):
            await enough.wait()

    asyncio.run(run())
    assert delays[:8] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_list_in_pages_is_whole_also_after_an_expired_page(monkeypatch):
    monkeypatch.setattr(reflector, "_FIRST_DELAY_S", 0.001)

    async def run():
        kube, turned = FakeKube(), []
        kube.page_size = 1
        for name in ("a", "b", "c"):
            kube.put(pod(name))

        def turn_page(path):
            turned.append(path)
            if len(turned) == 2:
                # The object was on a page that has been read already.
                del kube.objects["/api/v1/namespaces/team/pods/a"]
                raise KubeError(410, "The provided continue parameter is too old")

        kube.turn_page = turn_page
        async with reflecting(kube) as found:
            assert names(found) == ["b", "c"]
            assert len(turned) == 3

    asyncio.run(run())


def test_each_page_is_a_sign_of_life(monkeypatch):
    async def run():
        kube, loop, late = FakeKube(), asyncio.get_running_loop(), [0.0]
        kube.page_size, real_time = 1, loop.time
        kube.put(pod("a"))
        kube.put(pod("b"))
        found = Reflector(kube, Watched(api_version="v1", kind="Pod"), lambda _: None)
        silences = []

        def turn_page(path):
            silences.append(found.silence_seconds(loop.time()))
            late[0] += 100

        kube.turn_page = turn_page
        kube.put(pod("c"))
        monkeypatch.setattr(loop, "time", lambda: real_time() + late[0])
        await found._list("/api/v1/pods")
        assert len(silences) == 2 and max(silences) < 50
        assert found.silence_seconds(loop.time()) < 50

    asyncio.run(run())


def test_a_relist_finds_changes_that_no_watch_reported_and_watches_go_on():
    async def run():
        kube = FakeKube()
        for namespace in ("team", "other"):
            kube.put(pod("a", namespace=namespace))
        async with reflecting(kube, namespaces=("team", "other")) as found:
            await until(lambda: len(kube._watches) == 2)
            for namespace in ("team", "other"):
                path = f"/api/v1/namespaces/{namespace}/pods"
                kube.objects[f"{path}/b"] = kube.objects.pop(f"{path}/a")
                kube.objects[f"{path}/b"]["metadata"]["name"] = "b"
            await found.relist()
            assert (names(found), names(found, ("other", "chat"))) == (["b"], ["b"])
            await until(lambda: len(kube._watches) == 4)
            kube.put(pod("c"))
            await until(lambda: names(found) == ["b", "c"])

    asyncio.run(run())


def test_a_relist_returns_also_where_the_kind_is_gone():
    async def run():
        kube = FakeKube()
        async with reflecting(kube) as found:
            kube.refusals["list", "/pods"] = KubeError(404, "not found")
            await found.relist()
            assert not found.is_synced.is_set()

    asyncio.run(run())


def test_an_object_with_an_edited_label_leaves_no_copy_under_the_old_one(monkeypatch):
    monkeypatch.setattr(reflector, "_FIRST_DELAY_S", 0.001)

    async def run():
        kube, changes = FakeKube(), []
        kube.put(pod("a"))
        async with reflecting(kube, changes) as found:
            await until(lambda: kube._watches)
            changes.clear()
            kube.put(pod("a", "other"))
            await until(lambda: names(found, ("team", "other")) == ["a"])
            assert (names(found), changes) == ([], [("team", "chat"), ("team", "other")])
            # The label is edited again, and a list finds this edit.
            kube.objects["/api/v1/namespaces/team/pods/a"]["metadata"]["labels"]["rayloom.dev/service"] = "third"
            kube.end_watches("/pods", KubeError(410, "too old resource version"))
            await until(lambda: names(found, ("team", "third")) == ["a"])
            assert names(found, ("team", "other")) == []

    asyncio.run(run())


def test_marks_find_the_services_with_a_pod_on_a_node():
    def on(node, name, service="chat"):
        return pod(name, service) | {"spec": {"nodeName": node} if node else {}}

    async def run():
        kube = FakeKube()
        for each in (on("n1", "a"), on("n2", "b"), on("n2", "c", "other"), on("", "d", "third")):
            kube.put(each)
        async with reflecting(kube, shape=shapes.PodFields, slim=shapes.pod, mark=shapes.node_of) as found:
            await until(lambda: kube._watches)
            assert found.marked("n1") == {("team", "chat")}
            assert found.marked("n2") == {("team", "chat"), ("team", "other")}
            assert found.marked("n3") == set()
            kube.put(on("n3", "d", "third"))
            kube.remove("/api/v1/namespaces/team/pods/a")
            await until(lambda: found.marked("n3") == {("team", "third")} and not found.marked("n1"))

    asyncio.run(run())
