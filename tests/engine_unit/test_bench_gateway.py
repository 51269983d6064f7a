"""`bench gateway`: the simulated engine, the plain server, the table of given figures, and a short real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from rayloom_bench.gateway import page as gateway_page
from rayloom_bench.gateway.engine import Generator
from rayloom_bench.gateway.load import LoadResult, request
from rayloom_bench.gateway.page import figures_table, verdicts
from rayloom_bench.gateway.rounds import ServerFigures
from rayloom_bench.gateway.servers import DIRECT, GATEWAY
from rayloom_bench.gateway.text import FIRST_WORD_ID, WORDS, write_tokenizer
from rayloom_bench.gateway.upstream import EVENTS
from rayloom_engine.cli.commands import run
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core_server.sockets import CoreIo, Disconnected
from rayloom_engine.protocol.messages import Abort, CoreMessage, Outputs, SequenceOutput, Submit
from rayloom_engine.text.tokenizer import Tokenizer


class SentMessages:
    """Takes the place of the engine's sockets."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, tuple[SequenceOutput, ...]]] = []

    def send(self, connection: int, message: CoreMessage) -> None:
        assert isinstance(message, Outputs)
        self.sent.append((connection, message.outputs))

    def take(self) -> list[tuple[int, list[tuple[str, int, str | None]]]]:
        """Connection, and for each output its sequence, token and finish reason."""
        sent, self.sent = self.sent, []
        return [
            (connection, [(each.sequence_id, each.token_ids[0], each.finish_reason) for each in outputs])
            for connection, outputs in sent
        ]


def submit(sequence_id: str, max_tokens: int) -> Submit:
    return Submit(sequence_id=sequence_id, prompt_ids=(1,), params=DecodingParams(max_tokens=max_tokens))


def test_the_simulated_engine_sends_a_message_for_each_gateway_in_each_step() -> None:
    sockets = SentMessages()
    generator = Generator(cast("CoreIo", sockets))
    generator.receive(1, submit("a", 3))
    generator.receive(1, submit("b", 2))
    generator.receive(2, submit("c", 9))
    first = FIRST_WORD_ID
    assert sockets.take() == [(1, [("a", first, None)]), (1, [("b", first, None)]), (2, [("c", first, None)])]
    generator.step()
    assert sockets.take() == [(1, [("a", first + 1, None), ("b", first + 1, "length")]), (2, [("c", first + 1, None)])]
    generator.receive(2, Abort("c"))
    generator.step()
    assert sockets.take() == [(1, [("a", first + 2, "length")])]
    generator.receive(3, submit("d", 9))
    sockets.take()
    generator.receive(3, Disconnected())
    generator.step()
    assert sockets.take() == []


def test_the_words_of_both_servers_are_the_same(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    ids = range(FIRST_WORD_ID, FIRST_WORD_ID + len(WORDS))
    assert [tokenizer.token_text(token_id) for token_id in ids] == [f" {word}" for word in WORDS]
    size, event, rest = EVENTS[1].partition(b"\r\n")[0], EVENTS[1].partition(b"\r\n")[2][:-2], EVENTS[1][-2:]
    assert int(size, 16) == len(event) and rest == b"\r\n"
    assert json.loads(event.removeprefix(b"data: "))["choices"][0]["delta"] == {"content": f" {WORDS[1]}"}


def test_a_request_has_its_length() -> None:
    head, _, body = request(7).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head.split(b"\r\n")
    assert json.loads(body)["max_tokens"] == 7


def figures(
    name: str, costs_us: list[float], first_event_s: float, alone_s: float, version: str = "1"
) -> ServerFigures:
    rounds = tuple(
        LoadResult(
            num_events=1000,
            num_tokens=2000,
            seconds=0.5,
            cpu_s=1000 * cost / 1e6,
            first_event_s=(first_event_s,),
            alone_first_event_s=(alone_s,),
        )
        for cost in costs_us
    )
    return ServerFigures(name=name, version=version, rounds=rounds)


FIGURES = [
    figures(GATEWAY, [21.0, 19.0, 18.0], 0.0032, 0.0023),
    figures(DIRECT, [8.0], 0.0002, 0.0001, version=""),
    figures("aiohttp proxy", [25.0], 0.0062, 0.0011),
    ServerFigures(name="nginx", version="not installed", rounds=()),
]


def test_the_table_has_medians_and_what_is_added_to_no_proxy() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in figures_table(FIGURES).splitlines()[2:]]
    assert rows == [
        [f"{GATEWAY} 1", "19.0 (18.0 to 21.0)", "9.5", "1,053", "2,000", "3.20", "3.00", "2.30", "2.20"],
        [DIRECT, "-", "-", "-", "2,000", "0.20", "-", "0.10", "-"],
        ["aiohttp proxy 1", "25.0 (25.0 to 25.0)", "12.5", "800", "2,000", "6.20", "6.00", "1.10", "1.00"],
        ["nginx not installed", "-", "-", "-", "-", "-", "-", "-", "-"],
    ]


def test_goals_are_met_or_missed() -> None:
    assert [sentence.split(", ")[-1] for sentence in verdicts(FIGURES)] == ["met.", "MISSED.", "met."]
    assert "19.0 us, met." in gateway_page.page("conditions", "workload", FIGURES)


def test_a_short_run_measures_the_gateway_beside_proxies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--streams", "2", "--seconds", "1", "--rounds", "1", "--probes", "1", "--engines", "1"]
    found = tmp_path / "found.json"
    assert run(["bench", "gateway", *flags, "--json", str(found), "--page", str(tmp_path)]) == 0
    document: dict[str, Any] = json.loads(found.read_text())
    assert {GATEWAY, DIRECT, "aiohttp proxy"} <= set(document)
    for each in document.values():
        assert each["event_us"][0] >= 0.0 and each["first_event_ms"] > 0.0 and each["alone_first_event_ms"] > 0.0
        assert 0.0 < each["events_s"][0] < 150.0  # 2 streams of 50 tok/s, perhaps fewer beside other processes
    assert "| rayloom-engine gateway" in (tmp_path / "gateway.md").read_text()
    assert "CPU us per event" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--streams", "--rate", "--engines", "--seconds", "--probes", "--rounds"])
def test_zeros_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["bench", "gateway", flag, "0"])
    assert "0 is not positive" in capsys.readouterr().err
