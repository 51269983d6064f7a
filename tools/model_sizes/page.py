"""The page docs/benchmarks/sizing.md: figures of `plan` for published models, beside those of the models' tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_sizes.expected import rank_bytes, weights_of
from model_sizes.planned import chosen, planned_bytes, stage_layers
from model_sizes.tensors import Tensor
from published_models import PUBLISHED, config_path
from rayloom_operator.api.costs import ELEMENT_BYTES
from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.shipped_facts import PublishedModel
from rayloom_operator.resolve.rank_memory import GIB

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "sizing.md"
TENSOR_SIZES = (1, 2, 4, 8, 16)
PIPELINE_SIZES = (1, 2, 3, 4, 8, 16)

_TEXT = """# Sizes of published models

`make facts` wrote this page. For each model, transformers made the model on the meta device from its `config.json`
(`tools/model_configs/`), and the bytes of its tensors were added up for each rank. `rayloom-operator plan` computes the
same bytes from what `rayloom-engine inspect` says. The *difference* is the largest over all tensor sizes up to 16 that
the model allows, times 1, 2, 3, 4, 8 and 16 stages; a test refuses more than 2 %. Parameters are in billions; of a
mixture-of-experts model those that a token uses are in brackets. *Shape* is what `plan` chooses for one request of 8192
tokens on nodes of eight GPUs with 80 GiB each: TP2xPP1 is two tensor parallel ranks in one pipeline stage, and - means
that no shape fits.

## Dense weights

| model | backend | parameters | by `plan`, GiB | by tensors, GiB | difference | shape |
|---|---|---|---|---|---|---|
{dense}

## Quantised checkpoints

A rank on a CPU holds the weights [as they are](../models.md#checkpoints-with-quantised-weights), and on a GPU in the
type of the other weights. The shape is that of GPUs.

| model | scheme | parameters | stored, GiB | CPU by `plan`, GiB | by tensors, GiB | difference | GPUs, GiB | shape |
|---|---|---|---|---|---|---|---|---|
{quantised}

## Refused models

The engine cannot serve these models, and `plan` says why, before any GPU is rented:

| model | reason |
|---|---|
{refused}
"""


def page(models: Mapping[str, PublishedModel], tensors: Mapping[str, tuple[Tensor, ...]]) -> str:
    """Returns the text of the page."""
    served = {name: model.facts for name, model in models.items() if model.facts is not None}
    rows = {name: _row(name, facts, tensors[name]) for name, facts in sorted(served.items(), key=_order)}
    refused = [f"| {_title(name)} | {model.refusal} |" for name, model in models.items() if model.refusal]
    dense = [row for name, row in rows.items() if served[name].quantization is None]
    quantised = [row for name, row in rows.items() if served[name].quantization is not None]
    return _TEXT.format(dense="\n".join(dense), quantised="\n".join(quantised), refused="\n".join(refused))


def differences(
    facts: ModelFacts, config: Mapping[str, Any], tensors: tuple[Tensor, ...], *, keeps_quantised: bool
) -> dict[tuple[int, int], float]:
    """Returns (tensor size, stages) -> the plan's bytes divided by the tensors' bytes, minus 1."""
    assert facts.costs is not None
    element_bytes = ELEMENT_BYTES[facts.shape.checkpoint_dtype]
    found = {}
    for tensor_size in set(TENSOR_SIZES) & set(facts.costs.tensor):
        for pipeline in PIPELINE_SIZES:
            ranks = rank_bytes(
                tensors,
                config,
                tensor_size=tensor_size,
                stages=stage_layers(facts, pipeline),
                element_bytes=element_bytes,
                keeps_quantised=keeps_quantised,
                by_plan=facts.shape.model_backend is not None,
            )
            planned = planned_bytes(facts, tensor_size, pipeline, keeps_quantised=keeps_quantised)
            found[tensor_size, pipeline] = planned / max(ranks) - 1
    return found


def read_config(name: str) -> dict[str, Any]:
    """Returns the config.json of a published model."""
    config: dict[str, Any] = json.loads(config_path(name).read_text(encoding="utf-8"))
    return config


def _order(item: tuple[str, ModelFacts]) -> tuple[str, int]:
    return item[1].quantization or "", item[1].num_parameters


def _title(name: str) -> str:
    repositories = PUBLISHED[name].repositories
    return repositories[-1] if repositories else name


def _row(name: str, facts: ModelFacts, tensors: tuple[Tensor, ...]) -> str:
    config = read_config(name)
    is_quantised = facts.quantization is not None
    element_bytes = ELEMENT_BYTES[facts.shape.checkpoint_dtype]
    (by_tensors,) = rank_bytes(
        tensors,
        config,
        tensor_size=1,
        stages=stage_layers(facts, 1),
        element_bytes=element_bytes,
        keeps_quantised=is_quantised,
        by_plan=False,
    )
    largest = max(map(abs, differences(facts, config, tensors, keeps_quantised=is_quantised).values()))
    parameters = f"{weights_of(tensors) / 1e9:.2f}"
    if facts.num_active_parameters is not None:
        parameters += f" ({facts.num_active_parameters / 1e9:.2f})"
    planned = _gib(planned_bytes(facts, 1, 1, keeps_quantised=is_quantised))
    sizing = chosen(facts)
    shape = "-" if sizing is None else sizing.shape
    cells = [_title(name), facts.quantization or facts.shape.model_backend or "native", parameters]
    if is_quantised:
        # For a GGUF model, `checkpoint_bytes` is not the size of its files.
        is_gguf = config["quantization_config"]["quant_method"] == "gguf"
        cells.append("-" if is_gguf else _gib(facts.checkpoint_bytes))
    cells += [planned, _gib(by_tensors), f"{100 * largest:.2f} %"]
    if is_quantised:
        cells.append(_gib(planned_bytes(facts, 1, 1)))
    return f"| {' | '.join([*cells, shape])} |"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"
