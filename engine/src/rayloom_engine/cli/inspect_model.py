"""`rayloom-engine inspect`: a model's shape, parameters and bytes as JSON, without reading a weight."""

from __future__ import annotations

import argparse
import dataclasses
import json

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("inspect", help="print a model's shape as JSON", description=__doc__)
    parser.add_argument("--model", default="builtin://smollm2-135m", help="as in serve [builtin://smollm2-135m]")
    parser.add_argument("--revision", default=None, help="hub revision")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rayloom_engine.models.shape import read_shape
    from rayloom_engine.models.source import resolve

    resolved = resolve(args.model, args.revision)
    shape = read_shape(resolved.path)
    document = {
        "source": resolved.source,
        "commit": resolved.commit,
        "path": str(resolved.path),
        "shape": dataclasses.asdict(shape),
        "num_parameters": shape.num_parameters,
        "weight_bytes": {dtype: shape.weight_bytes(size) for dtype, size in ELEMENT_BYTES.items()},
        "kv_bytes_per_token": {dtype: shape.kv_bytes_per_token(size) for dtype, size in ELEMENT_BYTES.items()},
    }
    print(json.dumps(document, indent=2))
    return 0
