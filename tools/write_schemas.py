"""Writes the JSON schemas of the contract between operator and engine: `make schemas`.

schemas/engine-config.v1.json    the file that the operator writes and the engine reads
schemas/gateway-config.v1.json   the file that the operator writes and a gateway reads
schemas/gateway-models.v1.json   a gateway's list of models
schemas/gateway-status.v1.json   the answer of the admin port of a gateway with several models
schemas/status.v1.json           the answer of the engine's admin port
schemas/inspection.v2.json       the result of `rayloom-engine inspect` for the operator
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel

from rayloom_engine.config import EngineConfig
from rayloom_engine.front.gateway.gateway_config import document_model
from rayloom_engine.front.gateway.models.gateway_status import GatewayStatus
from rayloom_engine.front.gateway.models.models_document import ModelsDocument
from rayloom_engine.models.inspection import Inspection
from rayloom_engine.status import EngineStatus

FOLDER = Path(__file__).resolve().parent.parent / "schemas"
SCHEMAS: dict[str, type[BaseModel]] = {
    "engine-config.v1.json": EngineConfig,
    "gateway-config.v1.json": document_model(),
    "gateway-models.v1.json": ModelsDocument,
    "gateway-status.v1.json": GatewayStatus,
    "status.v1.json": EngineStatus,
    "inspection.v2.json": Inspection,
}


def schema_text(model: type[BaseModel]) -> str:
    """The text of the model's JSON schema file."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, model in SCHEMAS.items():
        (FOLDER / name).write_text(schema_text(model), encoding="utf-8")
        print(f"wrote schemas/{name}")


if __name__ == "__main__":
    main()
