"""`rayloom-engine inspect`: a model's shape, parameters and costs as JSON, without reading any weight."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rayloom_engine.cli.arguments import add_model_argument, model_of
from rayloom_engine.common.process import EXIT_CONFIG
from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from rayloom_engine.models.checkpoint.source import ResolvedModel
    from rayloom_engine.models.draft_facts import DraftFacts
    from rayloom_engine.models.inspection import Inspection
    from rayloom_engine.models.shape import ModelShape

_Found = TypeVar("_Found")


class _TooLate(ModelError):
    """A hub or a volume that does not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _InspectedModels:
    """The model, and the facts of its draft model; None if no draft model was named."""

    resolved: ResolvedModel
    shape: ModelShape
    draft: DraftFacts | None = None


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "inspect",
        help="print a model's shape and costs as JSON",
        usage="rayloom-engine inspect [MODEL] [flags]",
        description="Prints a model's shape, parameters and costs as JSON. Reads no weight.",
        allow_abbrev=False,
    )
    add_model_argument(parser)
    parser.add_argument("--model", help=f"as in serve. Default: {EngineConfig().model}.")
    parser.add_argument("--revision", default=None, help="hub revision. Default: main.")
    parser.add_argument(
        "--model-backend",
        choices=["auto", "native", "transformers"],
        default="auto",
        help="as in serve. Default: auto.",
    )
    parser.add_argument(
        "--draft-model", default=None, metavar="MODEL", help="as in serve: its facts, and whether it fits the model."
    )
    parser.add_argument(
        "--draft-revision", default=None, metavar="REVISION", help="hub revision of the draft model. Default: main."
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        help="seconds that the hub or the volume may take for each of the two models. Default: 60.",
    )
    parser.add_argument(
        "--termination-log",
        type=Path,
        default=os.environ.get("RAYLOOM_TERMINATION_LOG"),
        metavar="FILE",
        help="file for the facts, or the reason of a failure, in 4095 bytes. Default: $RAYLOOM_TERMINATION_LOG.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rayloom_engine.models.inspection import facts, failure

    model = model_of(args) or EngineConfig().model
    if args.draft_revision is not None and args.draft_model is None:
        raise ConfigError("--draft-revision is for a draft model; add --draft-model, or remove it")
    try:
        found = _inspect(model, args)
    except ModelError as error:
        _leave(args.termination_log, failure(error))
        if not isinstance(error, _TooLate):
            raise
        print(f"rayloom-engine: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_CONFIG)  # an ordinary exit would wait for a download that hangs
    inspection = facts(found.resolved, found.shape, found.draft)
    _leave(args.termination_log, inspection)
    print(json.dumps(_document(found.resolved, found.shape, inspection), indent=2))
    return 0


def _document(resolved: ResolvedModel, shape: ModelShape, inspection: Inspection) -> dict[str, Any]:
    """Returns the facts. Adds, for human readers, the whole shape and the model's bytes in each data type."""
    from rayloom_engine.models.quantised.amounts import weight_bytes
    from rayloom_engine.models.shape import DTYPE_BYTES

    described = {**dataclasses.asdict(shape), "attention_span": shape.attention_span}
    del described["scheme"]  # the field `quantization` names the scheme
    if (experts := described["experts"]) is not None:
        experts["dense_layers"] = sorted(experts["dense_layers"])  # JSON has no sets
    return inspection.model_dump(mode="json", exclude_none=True) | {
        "source": resolved.source,
        "commit": resolved.commit,
        "shape": described,
        "weight_bytes": {dtype: weight_bytes(shape, size) for dtype, size in DTYPE_BYTES.items()},
        "kv_bytes_per_token": {dtype: shape.kv_bytes_per_token(size) for dtype, size in DTYPE_BYTES.items()},
    }


def _inspect(model: str, args: argparse.Namespace) -> _InspectedModels:
    """Returns the models that the arguments name. Each may take `--timeout` seconds."""
    from rayloom_engine.models.draft_facts import draft_facts
    from rayloom_engine.models.inspection import inspect_draft, inspect_model

    resolved, shape = _within(args.timeout, model, lambda: inspect_model(model, args.revision, args.model_backend))
    if args.draft_model is None:
        return _InspectedModels(resolved=resolved, shape=shape)
    draft, draft_shape = _within(
        args.timeout,
        f"draft_model: {args.draft_model}",
        lambda: inspect_draft(args.draft_model, args.draft_revision, resolved, shape),
    )
    return _InspectedModels(resolved=resolved, shape=shape, draft=draft_facts(draft.commit, draft_shape))


def _within(seconds: float, name: str, look_up: Callable[[], _Found]) -> _Found:
    """Returns what `look_up` returns. Raises its exception, or _TooLate if it takes longer than `seconds`.

    After that time, the thread of `look_up` continues in the background. `name`: the model that it reads.
    """
    found: list[_Found] = []
    failed: list[Exception] = []

    def work() -> None:
        try:
            found.append(look_up())
        except Exception as error:  # noqa: BLE001 - the waiting thread raises it again
            failed.append(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        late = f"{name}: no answer within {seconds:g} s; check the network and HF_ENDPOINT, or the volume"
        raise _TooLate(late, "Unreachable")
    return found[0]


def _leave(where: Path | str | None, inspection: Inspection) -> None:
    if where:
        Path(where).write_text(inspection.text(), encoding="utf-8")
