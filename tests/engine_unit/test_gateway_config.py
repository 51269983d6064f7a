"""The gateway's settings and its list of engines: accepted values, and the message for each wrong value."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rayloom_engine.cli.commands import run
from rayloom_engine.common.process import EXIT_CONFIG
from rayloom_engine.errors import ConfigError
from rayloom_engine.front.gateway.engines_file import EnginesFile
from rayloom_engine.front.gateway.gateway_config import parse_gateway_config

WHOLE: dict[str, Any] = {
    "served_model_name": "m",
    "engines": {"first": "10.0.0.7:8002"},
    "key_file": "/key",
    "cache_dir": "/cache",
    "port": 9000,
}


def test_settings_of_http_are_those_of_an_engine() -> None:
    config = parse_gateway_config({**WHOLE, "hold_seconds": 5})
    assert (config.front.port, config.front.api_model_name, config.gateway.hold_seconds) == (9000, "m", 5.0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"served_model_name": None}, "served_model_name: missing; set it to the model's name in the API"),
        ({"key_file": None}, "key_file: missing; set --key-file"),
        ({"dtype": "float32"}, "dtype: a gateway has no such setting"),
        ({"engines": {}}, "engines: none is given; use --engine NAME=HOST:PORT, --engines-file FILE or --engines-dns"),
        (
            {"engines_dns": "e:8002"},
            "engines_dns cannot be combined with engines or engines_file; name the engines in one",
        ),
        (
            {"engines": {}, "engines_dns": "e:8002", "engines_file": "/e"},
            "engines_dns cannot be combined with engines or",
        ),
        (
            {"engines": {}, "engines_dns": "e.local"},
            "engines_dns: 'e.local' is not a name with a port; write HOST:PORT",
        ),
        ({"engines": {"first": "10.0.0.7"}}, "engine 'first': '10.0.0.7' is not an address; write HOST:PORT"),
        ({"engines": {"first": "host:0"}}, "engine 'first': 'host:0' is not an address"),
        ({"hold_seconds": -1}, "hold_seconds: Input should be greater than or equal to 0, given -1"),
        ({"port": 70000}, "port: Input should be less than or equal to 65535, given 70000"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, Any], sentence: str) -> None:
    document = {name: value for name, value in {**WHOLE, **changes}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        parse_gateway_config(document)
    assert sentence in str(caught.value)


def test_the_command_names_a_wrong_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--key-file", "/none", "--cache-dir", str(tmp_path), "--served-model-name", "m"]
    assert run(["gateway", *flags, "--engine", "10.0.0.7:8002"]) == EXIT_CONFIG
    assert "--engine '10.0.0.7:8002': write NAME=HOST:PORT" in capsys.readouterr().err


def test_values_nested_too_deeply_and_ports_of_thousands_of_digits_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is not JSON"):
        EnginesFile(path).read()
    path.write_text(json.dumps({"first": f"h:{'1' * 5000}"}))
    with pytest.raises(ConfigError, match="is not an address"):
        EnginesFile(path).read()


def test_a_changed_file_changes_the_engines_and_a_broken_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"

    def write(text: str) -> None:
        part = path.with_suffix(".part")
        part.write_text(text)
        os.replace(part, path)

    write(json.dumps({"first": "h:1"}))
    file = EnginesFile(path)
    assert file.read() == {"first": "h:1"}
    seen: list[dict[str, str]] = []

    async def watch() -> None:
        changed = asyncio.Event()

        def take(engines: Any) -> None:
            seen.append(dict(engines))
            changed.set()

        task = asyncio.create_task(file.watch(take))
        write("[not JSON")
        await asyncio.sleep(1.2)  # two checks
        assert seen == []
        write(json.dumps({"second": "h:2"}))
        await asyncio.wait_for(changed.wait(), 60.0)
        task.cancel()

    asyncio.run(watch())
    assert seen == [{"second": "h:2"}]
