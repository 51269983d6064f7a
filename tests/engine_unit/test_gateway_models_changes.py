"""Several models behind one port: faulty files and entries, changed settings, and the share of unknown keys."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rayloom_engine.errors import ConfigError
from rayloom_engine.front.gateway.models.gateway_status import ModelsFileStatus, content_hash
from rayloom_engine.front.gateway.models.models_document import ModelsDocument
from rayloom_engine.front.gateway.models.models_file import ModelsFile
from rayloom_engine.front.http import body
from rt_models import KEY, UNIFORM, World, refusal, run, running, said, until

MIB = 1 << 20
TWO = {"targets": [{"model": "two", "weight": 1}]}


def write(path: Path, document: object) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document))
    os.replace(part, path)


def test_a_wrong_entry_closes_its_model_and_leaves_the_others_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        path = tmp_path / "models.json"

        def entries(world: World, **more: Any) -> dict[str, Any]:
            models = {name: {"engines": {"e": world.places[name]}, "key": KEY} for name in ("one", "two")}
            return {"version": "v1", "models": models, "aliases": {"both": UNIFORM}, **more}

        files: list[ModelsFile] = []

        def make(world: World) -> ModelsDocument:
            document = entries(world)
            document["models"]["a b"] = document["models"]["one"]
            write(path, document)
            files.append(ModelsFile(path))
            return files[0].read()  # a new gateway starts with the usable models

        async with running(tmp_path, "one two", make) as w:
            await w.ready("one", "two")
            watch = asyncio.create_task(files[0].watch(w.models.apply))
            document = entries(w)
            document["models"]["one"]["api_key_file"] = w.keys("one", "k1")
            document["models"]["two"]["engines"] = {"e": "no port"}
            document["aliases"]["empty"] = {"targets": []}
            write(path, document)
            await until(lambda: "two" not in w.models.models)
            assert refusal(await w.chat("one"))[0] == 401, "the model was closed in the same file"
            assert said(await w.chat("one", "k1")) == "I am one."
            assert refusal(await w.chat("two", "k1"))[1] == "model_not_found"
            assert refusal(await w.chat("empty", "k1"))[1] == "model_not_found"
            assert said(await w.chat("both", "k1")) == "I am one.", "the target that can be used gets all requests"
            for sentence in ("models.a b: ", "models.two.engines.e: 'no port' is no", "aliases.empty.targets: "):
                assert sentence.removesuffix(" is no") in caplog.text
            watch.cancel()

    with caplog.at_level(logging.ERROR):
        run(story)


def test_a_list_that_could_not_be_applied_is_tried_again_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "models.json"
    write(path, {"version": "v1", "models": {}})
    file = ModelsFile(path)
    file.read()
    tries = 0
    applied = asyncio.Event()

    def apply(document: ModelsDocument) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise ConfigError("cache_dir: cannot write /c: No space left on device")
        applied.set()

    async def story() -> None:
        started = file.status()
        assert started == ModelsFileStatus(hash=content_hash(path.read_bytes()))
        watch = asyncio.create_task(file.watch(apply))
        write(path, {"version": "v1", "models": {"a b": {"engines": {"e": "h:1"}, "key": KEY}}})
        await until(lambda: file.status().refusal != "")
        assert file.status().model_dump() == {
            "hash": started.hash,
            "refusal": "cache_dir: cannot write /c: No space left on device",
            "problems": [],
        }
        await asyncio.wait_for(applied.wait(), 60.0)
        await until(lambda: file.status().hash == content_hash(path.read_bytes()))
        (problem,) = file.status().problems
        assert file.status().refusal == "" and problem.startswith("models.a b: ")
        written = path.read_bytes()
        path.write_text("[]")
        await until(lambda: file.status().refusal != "")
        assert file.status().refusal == f"{path} must hold an object, it holds list"
        assert file.status().hash == content_hash(written)
        watch.cancel()

    with caplog.at_level(logging.ERROR):
        asyncio.run(story())
    assert caplog.text.count("the models stay unchanged: cache_dir: cannot write") == 1
    assert caplog.text.count("models.a b: ") == 1


def test_a_model_that_cannot_be_made_keeps_no_other_model_open(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path, "one two", lambda world: world.document(one={})) as w:
            await w.ready("one")
            texts = tmp_path / "cache" / "texts"
            texts.rename(tmp_path / "moved")
            texts.write_text("no folder")
            document = w.document({"both": UNIFORM}, one={"api_key_file": w.keys("one", "k1")}, two={})
            with pytest.raises(ConfigError, match=r"models\.two: cache_dir: cannot write"):
                w.models.apply(document)
            assert refusal(await w.chat("one"))[0] == 401
            assert said(await w.chat("both", "k1")) == "I am one."
            assert refusal(await w.chat("two", "k1"))[1] == "model_not_found"
            texts.unlink()
            w.models.apply(document)
            await w.ready("two")
            assert said(await w.chat("two")) == "I am two."

    run(story)


def test_other_settings_refuse_no_request_and_keep_answers(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path, "one", lambda world: world.document(one={})) as w:
            await w.ready("one")
            headers = {"Idempotency-Key": "order-1"}
            first = await w.chat("one", headers=headers)
            before = w.models.models["one"]
            w.models.apply(w.document(one={"settings": {"max_output_tokens": 2}}))
            assert w.models.models["one"] is not before
            ready, answer = await asyncio.gather(w.http.get("/ready"), w.chat("one"))
            assert ready.status_code == 200
            assert said(answer) == "I ", "no request is refused, and the new setting counts"
            num_submits = len(w.cores["one"].submits)
            repeat = await w.chat("one", headers=headers)
            assert repeat.headers["idempotent-replayed"] == "true"
            assert repeat.json() == first.json()
            assert len(w.cores["one"].submits) == num_submits
            await until(lambda: not w.models.leaving)

    run(story)


def test_other_settings_while_an_answer_is_read_let_the_old_model_end_after_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path, "one", lambda world: world.document(one={})) as w:
            await w.ready("one")
            w.cores["one"].hold_after = 3
            first = asyncio.create_task(w.chat("one", headers={"Idempotency-Key": "order-1"}))
            await until(lambda: bool(w.cores["one"].submits))
            w.models.apply(w.document(one={"settings": {"repeat_seconds": 9.0}}))
            repeat = asyncio.create_task(w.chat("one", headers={"Idempotency-Key": "order-1"}))
            new = w.models.models["one"].service.lifecycle
            await until(lambda: new.num_readers == 1)
            w.cores["one"].release()
            assert (await first).json() == (await repeat).json()
            await until(lambda: new.num_readers == 0)
            await until(lambda: not w.models.leaving)

    run(story)


def test_streams_with_the_old_settings_continue_on_the_engines_that_come_with_the_new_settings(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path, "one two", lambda w: w.document(one={})) as w:
            await w.ready("one")
            first, second = w.cores.values()
            second.model, second.script = first.model, first.script
            first.hold_after = 3
            stream = asyncio.create_task(w.chat("one"))
            before = w.models.models["one"]
            await until(lambda: any(len(each.generated_ids) == 3 for each in before.service.client.unfinished()))
            settings = {"max_output_tokens": 100}
            w.models.apply(w.document(one={"engines": {"f": w.places["two"]}, "settings": settings}))
            assert said(await asyncio.wait_for(stream, 30.0)) == "I am one."

    run(story)


def test_unknown_keys_beside_an_open_model_share_one_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    share = body._BUDGET.share
    monkeypatch.setattr(body._BUDGET, "share", lambda tenant, most: (seen.append(tenant), share(tenant, most))[1])

    async def story() -> None:
        def make(world: World) -> ModelsDocument:
            return world.document(one={}, two={"api_key_file": world.keys("two", "k1", "k2")})

        async with running(tmp_path, "one two", make) as w:
            await w.ready("one", "two")
            for key in ("invented-1", "invented-2", ""):
                assert said(await w.chat("one", key)) == "I am one."
            assert set(seen) == {""}
            seen.clear()
            assert said(await w.chat("two", "k1")) == "I am two."
            assert "" not in seen

    run(story)


def test_a_repeat_with_the_same_request_id_goes_to_the_same_target(tmp_path: Path) -> None:
    async def story() -> None:
        both = {**UNIFORM, "sticky_by": None}
        async with running(tmp_path, "one two", lambda world: world.document({"both": both}, one={}, two={})) as w:
            await w.ready("one", "two")
            targets = []
            for number in range(12):
                answers = [await w.chat("both", headers={"X-Request-Id": f"request-{number}"}) for _ in range(2)]
                first, second = (answer.headers["x-rayloom-model"] for answer in answers)
                assert first == second
                targets.append(first)
            assert set(targets) == {"one", "two"}

    run(story)


def test_a_key_file_of_an_alias_that_cannot_be_read_is_counted_for_its_targets(tmp_path: Path) -> None:
    async def story() -> None:
        def make(world: World) -> ModelsDocument:
            targets = [{"model": "one", "weight": 1}]
            return world.document({"as": {"targets": targets, "api_key_file": str(tmp_path / "none")}}, one={}, two={})

        async with running(tmp_path, "one two", make) as w:
            text = (await w.admin.get("/metrics")).text
            assert 'rayloom:api_key_file_unusable{model_name="one"} 1' in text
            assert 'rayloom:api_key_file_unusable{model_name="two"} 0' in text

    run(story)


def test_a_body_may_be_as_long_as_the_models_of_its_key_take(tmp_path: Path) -> None:
    async def story() -> None:
        def make(world: World) -> ModelsDocument:
            two = {"api_key_file": world.keys("two", "k2"), "settings": {"max_body_bytes": 4 * MIB}}
            alias = {"targets": [{"model": "two", "weight": 1}], "api_key_file": world.keys("own", "k3")}
            return world.document({"own": alias}, one={"settings": {"max_body_bytes": MIB}}, two=two)

        async with running(tmp_path, "one two", make) as w:
            await w.ready("one", "two")
            limits = [w.models.max_body_bytes(w.models.ring.caller(key)) for key in (b"", b"unknown", b"k2", b"k3")]
            assert limits == [MIB, MIB, 4 * MIB, 4 * MIB]
            note = {"note": "x" * (2 * MIB)}
            assert refusal(await w.chat("two", "unknown", metadata=note))[0] == 413, "before it is parsed"
            assert said(await w.chat("two", "k2", metadata=note)) == "I am two."
            assert said(await w.chat("own", "k3", metadata=note)) == "I am two."
            assert refusal(await w.chat("one", "k2", metadata=note))[0] == 413

    run(story)


def test_the_state_names_the_missing_engine_of_a_model_that_was_ready(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path, "one", lambda world: world.document(one={})) as w:
            await w.ready("one")
            assert w.models.state()[0] == "serving"
            w.cores["one"].die()
            await until(lambda: w.models.state() == ("recovering", "no model has an engine that serves"))

    run(story)


def test_a_request_for_a_model_without_a_tokenizer_waits_for_it(tmp_path: Path) -> None:
    async def story() -> None:
        def nowhere(world: World) -> ModelsDocument:
            return world.document({"alias": TWO}, one={}, two={"engines": {"e": "127.0.0.1:1"}})

        async with running(tmp_path, "one two", nowhere) as w:
            await w.ready("one")
            assert (await w.http.get("/ready")).status_code == 200, "one model is enough"
            held = w.models.models["two"].held
            waiting = [asyncio.create_task(w.chat(name)) for name in ("two", "alias")]
            await until(lambda: len(held) == 2)
            assert said(await w.chat("one")) == "I am one.", "the other model answers meanwhile"
            w.models.apply(w.document({"alias": TWO}, one={}, two={}))
            assert [said(each) for each in await asyncio.gather(*waiting)] == ["I am two."] * 2
            assert len(held) == 0

        async with running(tmp_path / "again", "one two", nowhere) as w:
            await w.ready("one")
            held = w.models.models["two"].held
            waiting = [asyncio.create_task(w.chat("two"))]
            await until(lambda: len(held) == 1)
            w.models.lifecycle.drain(True)
            assert refusal(await waiting[0])[:2] == (503, "engine_draining"), "a drain does not wait for it"

    run(story)


def test_the_wait_for_a_tokenizer_is_a_part_of_the_wait_for_an_engine(tmp_path: Path) -> None:
    async def story() -> None:
        def nowhere(world: World) -> ModelsDocument:
            return world.document(one={}, two={"engines": {"e": "127.0.0.1:1"}})

        async with running(tmp_path, "one two", nowhere) as w:
            await w.ready("one")
            model, core = w.models.models["two"], w.cores["two"]
            waiting = asyncio.create_task(w.chat("two"))
            await until(lambda: len(model.held) == 1)
            began_s = time.monotonic()
            core.state = "recovering"  # the core has a tokenizer, but does not serve yet
            w.models.apply(w.document(one={}, two={}))
            await until(lambda: model.service.client.num_held() == 1)
            (held,) = model.service.client.unfinished()
            assert held.place.waits_since_s is not None
            assert held.place.waits_since_s <= began_s, "hold_seconds begin with the first wait"
            waited_s = time.monotonic() - began_s
            core.state = "serving"
            core.send_status()
            answer = await waiting
            assert said(answer) == "I am two."
            assert float(answer.headers["x-rayloom-cold-start"]) >= waited_s - 0.001, "it is rounded to milliseconds"

    run(story)


def test_requests_that_wait_with_the_old_settings_stay_in_the_queue_of_their_model(tmp_path: Path) -> None:
    async def story() -> None:
        nowhere: dict[str, Any] = {"engines": {"e": "127.0.0.1:1"}}
        async with running(tmp_path, "one two", lambda w: w.document(one={}, two=nowhere)) as w:
            await w.ready("one")
            waiting = asyncio.create_task(w.chat("two"))
            await until(lambda: len(w.models.models["two"].held) == 1)
            settings = {"settings": {"max_output_tokens": 100}}
            w.models.apply(w.document(one={}, two={**nowhere, **settings}))
            assert w.models.models["two"].service.status().requests.waiting == 1, "an engine is started for it"
            assert w.models.models["one"].service.status().requests.waiting == 0
            w.models.apply(w.document(one={}, two=settings))
            assert said(await waiting) == "I am two."
            assert w.models.models["two"].service.status().requests.waiting == 0

    run(story)


def test_requests_that_wait_for_a_tokenizer_end_with_their_clients_and_leave_places_for_other_keys(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        def nowhere(world: World) -> ModelsDocument:
            two = {"engines": {"e": "127.0.0.1:1"}, "api_key_file": world.keys("two", "k1", "k2")}
            return world.document(one={}, two=two)

        async with running(tmp_path, "one two", nowhere, max_queued_requests=4) as w:
            await w.ready("one")
            held = w.models.models["two"].held
            waiting = []

            async def send(key: str) -> None:
                waiting.append(asyncio.create_task(w.chat("two", key)))
                await until(lambda: len(held) == len(waiting))

            await send("k1")
            await send("k1")
            status, code, message = refusal(await w.chat("two", "k1"))
            assert (status, code) == (429, "queue_full")
            assert message.startswith("2 requests of this API key wait for an engine of the model")
            await send("k2")
            for task in waiting:
                task.cancel()  # closes the connection
            await until(lambda: len(held) == 0)
            waiting.clear()
            await send("k1")
            w.models.apply(w.document(one={}, two={"api_key_file": w.keys("two", "k1", "k2")}))
            assert said(await waiting[0]) == "I am two."

    run(story)


def test_requests_without_keys_wait_for_a_tokenizer_up_to_the_limit(tmp_path: Path) -> None:
    async def story() -> None:
        def nowhere(world: World) -> ModelsDocument:
            return world.document(one={}, two={"engines": {"e": "127.0.0.1:1"}})

        async with running(tmp_path, "one two", nowhere, max_queued_requests=4) as w:
            await w.ready("one")
            held = w.models.models["two"].held
            waiting = [asyncio.create_task(w.chat("two")) for _ in range(4)]
            await until(lambda: len(held) == 4)
            assert refusal(await w.chat("two"))[:2] == (429, "queue_full")
            w.models.lifecycle.drain(True)
            assert {each.status_code for each in await asyncio.gather(*waiting)} == {503}

    run(story)
