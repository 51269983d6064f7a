"""Several models behind one port, with fake engines: names, keys, aliases, and changes of the list."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from rayloom_engine.front.gateway.models.models_document import ModelsDocument
from rt_models import UNIFORM, World, refusal, run, running, said, until


def test_the_model_of_a_request_answers_and_other_names_are_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path, "one two", lambda world: world.document({"both": UNIFORM}, one={}, two={})) as w:
            await w.ready("one", "two")
            for name in ("one", "two"):
                answer = await w.chat(name)
                assert (said(answer), answer.json()["model"]) == (f"I am {name}.", name)
                assert "x-rayloom-model" not in answer.headers
            names = '"one", "two", "both"'
            assert refusal(await w.chat("three")) == (
                404,
                "model_not_found",
                f'the model "three" does not exist; this server has {names}',
            )
            assert refusal(await w.chat(None)) == (400, None, f"model is missing; set it to one of {names}")
            wrong = await w.http.post("/v1/completions", json={"model": 3, "prompt": "Hi"})
            assert refusal(wrong) == (400, None, "model must be a string, given 3")
            broken = await w.http.post("/v1/messages", content=b"{", headers={"Content-Type": "application/json"})
            assert (broken.status_code, broken.json()["type"]) == (400, "error")
            counted = await w.http.post("/tokenize", json={"model": "two", "prompt": "Hi"})
            assert counted.json()["count"] == 2
            assert (await w.http.get("/tokenizer_info", params={"model": "one"})).status_code == 200
            assert refusal(await w.http.get("/tokenizer_info"))[0] == 400
            assert (await w.http.get("/ui/status", params={"model": "two"})).json()["requests"]["failed"] == 0
            assert (await w.http.get("/ui/status")).status_code == 200
            large = await w.chat("one", metadata={"note": "x" * 300_000})
            assert said(large) == "I am one.", "a large body is read once, and handed on"

            listed = (await w.http.get("/v1/models")).json()["data"]
            assert [each["id"] for each in listed] == ["one", "two", "both"]
            assert listed[2]["targets"] == UNIFORM["targets"]
            assert (await w.http.get("/v1/models/both")).json()["max_model_len"] == 512
            assert (await w.http.get("/v1/models/three")).status_code == 404
            shared = {id(w.models.models[name].service.text.tokenizer) for name in ("one", "two")}  # type: ignore[union-attr]
            assert len(shared) == 1, "the models have the same tokenizer files, so one tokenizer is in memory"

            text = (await w.admin.get("/metrics")).text
            assert text.count("# TYPE rayloom:generation_tokens_total counter") == 1
            assert 'rayloom:generation_tokens_total{model_name="one"} 20.0' in text
            assert 'rayloom:generation_tokens_total{model_name="two"} 10.0' in text
            status = (await w.admin.get("/status")).json()
            assert (status["state"], status["in_flight"]) == ("serving", 0)
            assert {name: each["requests"]["finished"] for name, each in status["models"].items()} == {
                "one": 2,
                "two": 1,
            }
            minimal = (await w.admin.get("/status", headers={"Prefer": "return=minimal"})).json()
            assert minimal.pop("uptime_seconds") < 600
            state = {"version": "v1", "state": "serving", "reason": status["reason"], "in_flight": 0}
            assert minimal == state | {"models_file": {}}, "the operator reads 64 KiB at most"
            of_two = await w.admin.get("/status", params={"model": "two"}, headers={"Prefer": "return=minimal"})
            assert (of_two.json()["version"], of_two.json()["requests"]["finished"]) == ("v1", 1)
            unknown = await w.admin.get("/status", params={"model": "both"})  # an alias has no engines of its own
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
            engines = (await w.admin.get("/engines")).json()
            assert [each["state"] for model in engines["models"].values() for each in model["engines"]] == [
                "serving",
                "serving",
            ]

    run(story)


def test_names_are_served_behind_a_root_path_as_well(tmp_path: Path) -> None:
    async def story() -> None:
        def document(world: World) -> ModelsDocument:
            return world.document({"both": UNIFORM}, one={}, two={})

        async with running(tmp_path, "one two", document, root_path="/llm") as w:
            await w.ready("one", "two")
            for root in ("", "/llm"):
                listed = (await w.http.get(f"{root}/v1/models")).json()["data"]
                assert [each["id"] for each in listed] == ["one", "two", "both"]
                body = {"model": "two", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
                assert said(await w.http.post(f"{root}/v1/chat/completions", json=body)) == "I am two."
            assert (await w.http.get("/llm/llm/v1/models")).status_code == 404

    run(story)


def test_an_alias_keeps_its_users_and_repeats_and_names_its_target(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path, "one two", lambda world: world.document({"both": UNIFORM}, one={}, two={})) as w:
            await w.ready("one", "two")
            users: dict[str, set[str]] = {}
            for user in [f"u{number}" for number in range(12)] * 2:
                answer = await w.chat("both", user=user)
                assert answer.json()["model"] == "both"
                assert said(answer) == f"I am {answer.headers['x-rayloom-model']}."
                users.setdefault(user, set()).add(answer.headers["x-rayloom-model"])
            assert {len(targets) for targets in users.values()} == {1}
            assert set().union(*users.values()) == {"one", "two"}
            message = {"model": "both", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}
            for user, targets in list(users.items())[:3]:
                body = {**message, "metadata": {"user_id": user}}
                answer = await w.http.post("/v1/messages", json=body)
                assert {answer.headers["x-rayloom-model"]} == targets
                assert answer.json()["model"] == "both"
            for number in range(6):
                headers = {"Idempotency-Key": f"order-{number}"}
                first, repeat = [await w.chat("both", headers=headers) for _ in range(2)]
                assert repeat.headers["idempotent-replayed"] == "true"
                assert repeat.headers["x-rayloom-model"] == first.headers["x-rayloom-model"]
                assert repeat.json() == first.json()

    run(story)


async def unusable(world: World) -> list[tuple[str, str, int]]:
    """A tuple for each name whose keys cannot be read: (name, reason, number of keys that stay valid)."""
    status = (await world.admin.get("/status")).json()
    named = ((each["name"], each["problem"], each["accepted"]) for each in status["unusable_keys"])
    return [(name, problem.partition("'")[0], accepted) for name, problem, accepted in named]


def test_each_name_has_keys_of_its_own_and_strangers_learn_no_names(tmp_path: Path) -> None:
    async def story() -> None:
        def make(world: World) -> ModelsDocument:
            one, two = world.keys("one", "k1", "k1b"), world.keys("two", "k2")
            aliases = {
                "own": {"targets": [{"model": "two", "weight": 1}], "api_key_file": world.keys("own", "k3")},
                "as-two": {"targets": [{"model": "two", "weight": 1}]},
            }
            return world.document(aliases, one={"api_key_file": one}, two={"api_key_file": two})

        async with running(tmp_path, "one two", make) as w:
            await w.ready("one", "two")
            assert said(await w.chat("one", "k1")) == "I am one."
            assert said(await w.chat("own", "k3")) == "I am two."
            assert said(await w.chat("as-two", "k2")) == "I am two."
            stranger = refusal(await w.chat("one", "x"))
            assert stranger[:2] == (401, "invalid_api_key")
            for name, key in (("two", "k1"), ("two", "k3"), ("own", "k2"), ("as-two", "k3"), ("nothing", "x")):
                assert refusal(await w.chat(name, key)) == stranger
            assert refusal(await w.chat("nothing", "k2"))[2].endswith('this server has "two", "as-two"')
            for key, names in (("k1", ["one"]), ("k2", ["two", "as-two"]), ("k3", ["own"])):
                listed = await w.http.get("/v1/models", headers={"X-Api-Key": key})
                assert [each["id"] for each in listed.json()["data"]] == names
            assert (await w.http.get("/v1/models")).status_code == 401
            assert (await w.http.get("/ready")).status_code == 200
            tenants = {each.tenant for each in w.cores["two"].submits}
            assert len(tenants) == 2, "keys of the model and of its alias are two tenants"
            assert "" not in tenants

            gone = w.document({}, one={"api_key_file": str(tmp_path / "none")}, two={})
            w.models.apply(gone)
            assert refusal(await w.chat("one", "k1")) == stranger, "a file that cannot be read opens nothing"
            assert said(await w.chat("two")) == "I am two."
            assert refusal(await w.chat("nothing")) == stranger, "no name of a closed model can be guessed"
            missing = f"api_key_file: cannot read {tmp_path}/none: [Errno 2] No such file or directory: "
            assert await unusable(w) == [("one", missing, 0)], "every key is refused"
            w.keys("none", "k9")
            (tmp_path / "none").write_text("k9")
            await w.models.ring._sources["one"].refresh()
            assert said(await w.chat("one", "k9")) == "I am one."
            assert await unusable(w) == []
            (tmp_path / "none").unlink()
            await w.models.ring._sources["one"].refresh()
            assert await unusable(w) == [("one", missing, 1)], "the key that was read before stays in force"

    run(story)


def test_models_come_and_go_while_streams_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with running(tmp_path, "one two three", lambda world: world.document(one={}, two={})) as w:
            await w.ready("one", "two")
            tasks = len(asyncio.all_tasks())
            w.cores["one"].hold_after = 3
            body = {"model": "one", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
            async with w.http.stream("POST", "/v1/chat/completions", json=body) as stream:
                lines = stream.aiter_lines()
                assert "data: " in await anext(lines)
                two = w.models.models["two"]
                w.models.apply(w.document(two={}, three={}))
                assert w.models.models["two"] is two, "another model's change leaves it alone"
                await w.ready("three")
                assert refusal(await w.chat("one"))[1] == "model_not_found"
                assert said(await w.chat("three")) == "I am three."
                assert [each["model"] for each in (await w.admin.get("/engines")).json()["leaving"]] == ["one"]
                w.cores["one"].release()
                events = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
            text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
            assert "I am one.".endswith(text)
            assert events[-1]["choices"][0]["finish_reason"] == "stop", "the stream has ended normally"
            await until(lambda: not w.models.leaving)
            await until(lambda: not w.cores["one"]._writers)
            await until(lambda: len(asyncio.all_tasks()) <= tasks)

            w.models.apply(w.document(two={}))
            w.models.apply(w.document(two={"settings": {"max_output_tokens": 2}}))
            assert w.models.models["two"] is not two, "other settings need a new service"
            await w.ready("two")
            assert said(await w.chat("two")) == "I "
            assert (await w.http.get("/v1/models")).json()["data"][0]["id"] == "two"
            assert said(await w.chat(None)) == "I ", "with one model, the name may be left out"
            w.models.apply(w.document())
            assert (await w.http.get("/ready")).status_code == 503
            assert refusal(await w.chat("two"))[:2] == (503, "engine_starting")
            assert [line for line in caplog.messages if line.startswith("model ") and "last request" not in line] == [
                "model one: started",
                "model two: started",
                "model one: removed; its running requests finish",
                "model three: started",
                "model three: removed; its running requests finish",
                "model two: restarted with other settings; running requests finish with the old ones",
                "model two: removed; its running requests finish",
            ]

    caplog.set_level("INFO", "rayloom_engine.front.gateway.models.running_models")
    run(story)


def test_another_address_or_key_keeps_the_streams_of_all_models(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path, "one two", lambda world: world.document(one={}, two={})) as w:
            await w.ready("one", "two")
            service, others = w.models.models["one"].service, list(w.cores["two"].hellos)
            w.cores["one"].hold_after = 3
            waiting = asyncio.create_task(w.chat("one"))
            await until(lambda: bool(w.cores["one"].submits))
            second, place = await w.cores["one"].listen("another key of engines")
            w.models.apply(w.document(one={"engines": {"e": place}, "key": "another key of engines"}, two={}))
            w.cores["one"].release()
            assert said(await waiting) == "I am one."
            assert w.models.models["one"].service is service
            assert w.cores["two"].hellos == others, "the other model's connection is the same"
            second.close()

    run(story)


def test_the_uptime_does_not_follow_the_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with running(tmp_path, "one", lambda w: w.document(one={})) as w:
            monkeypatch.setattr(time, "time", lambda: 0.0)  # the clock was set back
            status = json.loads(w.models.status_json(is_minimal=True))
            assert 0.0 < status["uptime_seconds"] < 1000.0, "the operator refuses a status with a negative uptime"

    run(story)
