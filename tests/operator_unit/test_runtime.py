"""Probes, metrics and log lines of the operator."""

import asyncio
import json
import logging
import re
import socket
from pathlib import Path

import aiohttp
import pytest
import yaml

from rayloom_operator.__main__ import _parser, main
from rayloom_operator.errors import OperatorError, Refused
from rayloom_operator.telemetry import logs
from rayloom_operator.telemetry.health import serving
from rayloom_operator.telemetry.metrics import Metrics
from rt_ports import free_port
from rt_world import service, with_world

KEY = ("team", "chat")


def test_probes_and_metrics_are_on_one_port():
    async def run():
        said = {"/healthz": "", "/readyz": "not yet"}
        port, metrics = free_port(), Metrics()
        metrics.count_request("list", "200")
        probes = {path: lambda path=path: said[path] for path in said}
        async with serving(port, probes, metrics), aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

            async def get(path):
                async with session.get(path) as response:
                    return response.status, await response.text()

            assert (await get("/healthz"), await get("/readyz")) == ((200, "ok"), (503, "not yet"))
            said["/readyz"] = ""
            assert await get("/readyz") == (200, "ok")
            status, text = await get("/metrics")
            assert (status, 'rayloom_operator_api_requests_total{code="200",verb="list"} 1.0' in text) == (200, True)

    asyncio.run(run())


def test_a_port_that_is_taken_is_named():
    async def run():
        with socket.create_server(("0.0.0.0", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(OperatorError, match=f"cannot listen on port {port}.*--health-port"):
                async with serving(port, {}, Metrics()):
                    pass

    asyncio.run(run())


def lines(metrics, name):
    return [line for line in metrics.text().decode().splitlines() if line.startswith(f"rayloom_operator_{name}")]


def test_reconciles_are_counted_by_result():
    async def run():
        metrics = Metrics()
        ends = iter([1.0, Refused("no"), OperatorError("away"), ValueError("bug")])

        async def handle(key):
            end = next(ends)
            if isinstance(end, Exception):
                raise end
            return end

        measured = metrics.measured(handle)
        assert await measured(KEY) == 1.0
        for kind in (Refused, OperatorError, ValueError):
            with pytest.raises(kind):
                await measured(KEY)
        assert sorted(lines(metrics, "reconcile_total")) == [
            f'rayloom_operator_reconcile_total{{result="{result}"}} 1.0'
            for result in ("bug", "done", "failed", "refused")
        ]
        assert lines(metrics, "reconcile_seconds_count") == ["rayloom_operator_reconcile_seconds_count 4.0"]

    asyncio.run(run())


def test_services_are_counted_by_condition_at_each_scrape():
    async def story(world):
        metrics = world.controller._metrics
        assert lines(metrics, "services") == []
        world.ask_for(service())
        await world.until(lambda: world.reason() == "PodsPending")
        await world.rest()
        found = lines(metrics, "services")
        assert 'rayloom_operator_services{condition="Accepted",status="True"} 1.0' in found
        assert 'rayloom_operator_services{condition="Available",status="False"} 1.0' in found
        assert lines(metrics, "queue_depth") == ["rayloom_operator_queue_depth 0.0"]
        waits = [line.split()[0] for line in lines(metrics, "queue_seconds_count")]
        assert waits == [f'rayloom_operator_queue_seconds_count{{priority="{each}"}}' for each in ("new", "news")]
        assert lines(metrics, "engine") == [
            "rayloom_operator_engines_polled 0.0",
            "rayloom_operator_engine_poll_failures_total 0.0",
        ]

    with_world(story)


@pytest.mark.parametrize("kind", ["pods", "nodes"])  # without events of nodes the operator would miss drains
def test_a_watch_that_stands_still_fails_the_liveness_probe_and_is_named(kind):
    async def story(world):
        watches, path = world.controller.watches, f"/api/v1/{kind}"
        assert watches.problem() == ""
        reflector = watches.pods if kind == "pods" else watches.nodes.reflector
        reflector._alive_at[path] -= 181
        assert watches.problem() == f"no event and no failure of {path} for 180 s"

    with_world(story)


@pytest.fixture
def log(request, capsys):
    """Sets up logging, and restores it after the test."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield logs.set_up
    root.handlers[:] = before
    root.setLevel(level)


def test_a_line_in_json_has_time_level_logger_and_the_service(log, capsys):
    log("info", "json")
    token = logs.SERVICE.set("team/chat")
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("rayloom_operator.test").exception("it %s", "broke")
    finally:
        logs.SERVICE.reset(token)
    logging.getLogger("rayloom_operator.test").info("of no service")
    about = {"k8s_ref": {"kind": "LLMService", "namespace": "team", "name": "other"}}
    logging.getLogger("kopf.objects").warning("as kopf says it", extra=about)
    first, second, third = map(json.loads, capsys.readouterr().err.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first.pop("time"))
    assert first.pop("exception").endswith("ValueError: no")
    assert first == {
        "level": "error",
        "logger": "rayloom_operator.test",
        "message": "it broke",
        "service": "team/chat",
    }
    assert "service" not in second
    assert third["service"] == "team/other"


def test_a_line_for_people_is_one_line(log, capsys):
    log("info", "text")
    logging.getLogger("rayloom_operator.test").info("hello")
    assert re.fullmatch(r"[-\d]+ [\d:,]+ INFO rayloom_operator.test hello\n", capsys.readouterr().err)


def test_a_log_line_of_a_reconcile_carries_its_service(log, capsys):
    log("info", "json")

    async def story(world):
        world.ask_for(service())
        await world.until(lambda: world.reason() == "PodsPending")

    with_world(story)
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {each.get("service") for each in said if "apply" in each["message"]} == {"team/chat"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--key-file", "/nowhere"], "cannot read the operator's key /nowhere: No such file"),
        (["--key-file", __file__, "--watch-namespaces", "a,B"], "'B' is no name of a namespace"),
        (["--key-file", __file__, "--lease-seconds", "1"], "'1' is not a whole number of seconds from 2 to 3600"),
        (["--key-file", __file__, "--max-reconciles", "0"], "'0' is not a whole number from 1 to 64"),
        (["--key-file", __file__, "--log-format", "xml"], "invalid choice: 'xml'"),
    ],
)
def test_a_failed_start_gives_its_reason_in_one_sentence(flags, says, log, capsys):
    try:
        code = main(["run", "--engine-image", "i", *flags])
    except SystemExit as error:
        code = error.code
    assert code in (1, 2)
    assert says in capsys.readouterr().err


def test_every_flag_value_and_metric_is_in_the_docs():
    root = Path(__file__).resolve().parents[2]
    page = "".join((root / "docs" / name).read_text(encoding="utf-8") for name in ("operator.md", "metrics.md"))
    (commands,) = (action for action in _parser()._actions if action.dest == "command")
    flags = {flag for action in commands.choices["run"]._actions for flag in action.option_strings} - {"-h", "--help"}
    values = yaml.safe_load((root / "charts" / "rayloom-operator" / "values.yaml").read_text(encoding="utf-8"))

    async def story(world):
        found = re.findall(r"^# TYPE (rayloom_operator_\w+)", world.controller._metrics.text().decode(), re.MULTILINE)
        assert len(found) > 5
        # `Runtime` adds this metric.
        metrics = {*found, "rayloom_operator_leader"}
        assert {name for name in metrics | flags if name not in page} == set()
        assert {name for name in values if f"`{name}" not in page} == set()

    with_world(story)
