"""docs/api.md matches the code: its tables are generated from the code, and it names every route and error code."""

import importlib.util
import re
from pathlib import Path

from starlette.routing import Route

from rayloom_engine.config import EngineConfig
from rayloom_engine.front.app import api_app
from rayloom_engine.front.core_link.handshake import CoreAddress
from rayloom_engine.front.http.api_keys import ApiKeys
from rayloom_engine.front.operations.service import Service

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
FRONT = ROOT / "engine" / "src" / "rayloom_engine" / "front"


def load_tool():
    spec = importlib.util.spec_from_file_location("write_api_docs", ROOT / "tools" / "write_api_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_current():
    assert load_tool().written(PAGE) == PAGE, "the tables of docs/api.md are not current; run: make schemas"


def test_every_route_is_named():
    service = Service(EngineConfig(), {"core": CoreAddress("unix:/none", "token")}, api_url="http://none")
    routes = {
        f"{method} {route.path.replace('{model:path}', 'MODEL')}"
        for route in api_app(service, ApiKeys()).routes
        if isinstance(route, Route)
        for method in (route.methods or ()) - {"HEAD"}
    }

    assert routes
    assert {path for path in routes if f"{path.split()[0]} {path.split()[1]}`" not in PAGE} == set()


def test_every_error_code_has_a_row():
    source = "".join(path.read_text(encoding="utf-8") for path in FRONT.rglob("*.py") if path.name != "admin.py")
    codes = set(re.findall(r'code="(\w+)"', source))
    codes |= set(re.findall(r'"(engine_\w+)"', source)) - {"engine_version"}
    codes |= set(re.findall(r'"(\w+)", (?:\d+|RETRY_AFTER_S)\)', source))  # codes of unavailable()
    rows = PAGE.split("## Errors")[1].split("## Headers")[0]

    assert {"context_length_exceeded", "engine_draining", "engine_failed", "queue_full"} <= codes
    assert {code for code in codes if f"`{code}`" not in rows} == set()


def test_limits_are_the_settings_own():
    assert EngineConfig().max_body_bytes == 8 * 2**20
    assert "`max_body_bytes` (8 MiB)" in PAGE
