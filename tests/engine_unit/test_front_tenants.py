"""API keys, `cache_salt` and `priority` in Submits, and the Submits of a request's choices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rayloom_engine.front.http.api_keys import ApiKeys
from rayloom_engine.front.http.tenant import cache_key, owner_of_key, tenant_of_key
from rayloom_engine.front.operations.service import Waits
from rt_front import FrontUnderTest, running_front

WAITS = Waits(ping_s=0.05, accept_s=0.02)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front"), api_keys=("key-a", "key-b")) as front:
        yield front


@pytest.fixture(autouse=True)
def fresh_core(front: FrontUnderTest) -> None:
    front.do(front.core.reset)


def _as(front: FrontUnderTest, key: str, **fields: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return front.http.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})


def test_each_key_is_a_tenant_with_a_cache_of_its_own(front: FrontUnderTest) -> None:
    for key in ("key-a", "key-b", "key-a"):
        assert _as(front, key).status_code == 200
    first, other, again = front.do(lambda: list(front.core.submits))
    assert (first.tenant, first.cache_key) == (again.tenant, again.cache_key)
    assert first.tenant != other.tenant and first.cache_key != other.cache_key
    assert len(first.tenant) == 16 and "key-a" not in first.tenant, "a digest"
    assert len(first.cache_key) == 32


def test_one_key_is_no_tenant_but_has_a_cache_of_its_own(tmp_path: Path) -> None:
    with running_front(tmp_path, api_keys=("key-a", "key-a")) as front:  # the same key in the file and the environment
        assert _as(front, "key-a").status_code == 200
        [submit] = front.do(lambda: list(front.core.submits))
    assert (submit.tenant, submit.cache_key) == ("", cache_key(owner_of_key(b"key-a", 1), None))
    assert len(submit.cache_key) == 32


def test_without_keys_there_is_no_owner(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        assert _as(front, "anything").status_code == 200
        [submit] = front.do(lambda: list(front.core.submits))
    assert (submit.tenant, submit.cache_key) == ("", b"")


def test_no_key_finds_another_ones_prefixes_however_the_keys_change(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("key-a")
    keys = ApiKeys(path=path)
    found: dict[str, set[bytes]] = {"key-a": set(), "key-b": set()}
    tenants = []
    with running_front(tmp_path, api_keys=keys) as front:
        # A second key is added, the first is removed, and then the first replaces the second.
        for accepted in (["key-a"], ["key-a", "key-b"], ["key-b"], ["key-a"]):
            path.write_text("\n".join(accepted))
            front.run(keys.refresh())
            for key in accepted:
                assert _as(front, key).status_code == 200
                submit = front.do(lambda: front.core.submits[-1])
                found[key].add(submit.cache_key)
                tenants.append(submit.tenant)
    assert [len(of_key) for of_key in found.values()] == [1, 1], "a key keeps its prefixes"
    assert not found["key-a"] & found["key-b"]
    assert [bool(tenant) for tenant in tenants] == [False, True, True, False, False], "shares are for several keys"


def test_cache_salts_separate_the_requests_of_one_key(front: FrontUnderTest) -> None:
    for salt in ("salt1", "salt1", "salt2", None):
        assert _as(front, "key-a", cache_salt=salt).status_code == 200
    assert _as(front, "key-b", cache_salt="salt1").status_code == 200
    keys = [submit.cache_key for submit in front.do(lambda: list(front.core.submits))]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


def test_completions_take_a_cache_salt_too(front: FrontUnderTest) -> None:
    headers = {"Authorization": "Bearer key-a"}
    answer = front.http.post("/v1/completions", json={"prompt": "Hi", "cache_salt": "s"}, headers=headers)
    assert answer.status_code == 200
    [submit] = front.do(lambda: list(front.core.submits))
    assert submit.cache_key == cache_key(tenant_of_key(b"key-a", 2), "s")


@pytest.mark.parametrize("salt", ["", 5, ["s"], True])
def test_a_cache_salt_is_a_string_that_is_not_empty(front: FrontUnderTest, salt: object) -> None:
    answer = _as(front, "key-a", cache_salt=salt)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"


def test_a_salt_is_no_other_tenants_name() -> None:
    assert cache_key("", None) == b""
    salts = (None, "", "s", "\0s", "\ud800")
    assert len({cache_key(tenant, salt) for tenant in ("", "t", "ts") for salt in salts}) == 15


def test_a_priority_is_refused_where_it_would_have_no_effect(front: FrontUnderTest) -> None:
    for priority in (1, -(2**31)):
        answer = _as(front, "key-a", priority=priority)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "priority"
        assert "--enable-priority" in answer.json()["error"]["message"]
    for priority in (0, None):
        assert _as(front, "key-a", priority=priority).status_code == 200


def test_a_priority_reaches_the_core_where_it_is_enabled(tmp_path: Path) -> None:
    with running_front(tmp_path, enable_priority=True) as front:
        assert front.chat(priority=-3).status_code == 200
        assert [submit.priority for submit in front.do(lambda: list(front.core.submits))] == [-3]


def test_the_choices_of_a_request_cross_with_one_prompt(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 3))
    with front.http.stream(
        "POST",
        "/v1/completions",
        json={"prompt": ["one", "two"], "n": 3, "stream": True},
        headers={"Authorization": "Bearer key-a"},
    ) as response:
        front.wait_until(lambda: len(front.core.submits) == 6, "the core has them")
        assert front.do(lambda: front.core.num_prompts) == 2
        front.do(front.core.die)
        front.wait_until(lambda: len(front.core.submits) == 12, "they are submitted again")
        front.do(front.core.release)
        assert response.read().endswith(b"data: [DONE]\n\n")
    assert front.do(lambda: front.core.num_prompts) == 4
    submits = front.do(lambda: list(front.core.submits))
    assert [submit.prompt_ids for submit in submits] == [*[tuple(b"one")] * 3, *[tuple(b"two")] * 3] * 2


def test_one_key_cannot_fill_the_fronts_queue_for_others(tmp_path: Path) -> None:
    settings = {"max_queued_requests": 4, "max_num_seqs": 1}
    with running_front(tmp_path, api_keys=("key-a", "key-b"), waits=WAITS, **settings) as front:
        front.do(lambda: setattr(front.core, "is_silent", True))
        too_many = _as(front, "key-a", n=3)
        assert too_many.status_code == 400
        assert "at most 2 of one API key" in too_many.json()["error"]["message"]
        with _held(front, "key-a", n=2), _held(front, "key-a"):
            assert front.do(front.service.client.num_silent) == 3, "one runs, and two are half of the queue"
            refused = _as(front, "key-a")
            assert refused.status_code == 429
            assert "3 sequences of this API key wait for their first token" in refused.json()["error"]["message"]
            with _held(front, "key-b"):
                pass


def _held(front: FrontUnderTest, key: str, **fields: object):
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, **fields}
    headers = {"Authorization": f"Bearer {key}"}
    return _Accepted(front.http.stream("POST", "/v1/chat/completions", json=body, headers=headers))


class _Accepted:
    """An accepted stream, which stays open until the block ends."""

    def __init__(self, stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        assert self._stream.__enter__().status_code == 200

    def __exit__(self, *problem) -> None:
        self._stream.__exit__(*problem)
