"""A model with parts that the test defines: kernel backends, an attention plan, and quantised weights.

Future kernels and formats will be such parts. The model uses them only through its interfaces `KernelSet`,
`AttentionPlan` and `SchemeFactory`.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rayloom_engine.errors import ConfigError
from rayloom_engine.kernels.attention import AttentionBatch, AttentionPlan
from rayloom_engine.kernels.backend import Backend
from rayloom_engine.layers.destination import Destination
from rayloom_engine.layers.linear_spec import LinearSpec
from rayloom_engine.layers.schemes import WeightScheme
from rayloom_engine.layers.schemes.dense import DenseSchemes
from rayloom_engine.models.decoder import CausalLM
from rayloom_engine.models.empty import empty_model
from rayloom_engine.models.loader import load_model
from rayloom_engine.models.model import RankModel
from rayloom_engine.models.shape import read_shape
from rayloom_engine.parallel.model_part import ModelPart, whole_part
from rayloom_engine.parallel.shard import Shard
from rayloom_engine.parallel.stage import whole_model
from rt_stages import load_stages, stage_config
from rt_tiny import TinySequence, advance, cpu_kernels, load_tiny, make_cache, tiny_checkpoint, tiny_variant

TOKEN_IDS = [5, 200, 17, 3, 3, 90, 41, 8, 9, 150, 77]
GROUP = 16
LOGGER = "rayloom_engine.worker.part_loading"


def logits_of(model: RankModel) -> torch.Tensor:
    sequence = TinySequence(TOKEN_IDS, block_table=[3, 1, 6])
    cache = make_cache(model.shape)
    return torch.cat([advance(model, cache, [(sequence, count)])[0] for count in (6, 4, 1)])


@pytest.mark.parametrize("backend", ["plain", "reference"])
@pytest.mark.parametrize("variant", ["llama-biases", "mistral-window", "qwen3-biases"])
def test_every_backend_computes_the_same_model(variant: str, backend: Backend, tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, variant)
    expected = logits_of(load_tiny(folder))
    torch.testing.assert_close(logits_of(load_tiny(folder, backend)), expected, atol=1e-4, rtol=0)


def test_the_environment_chooses_the_backend_of_a_rank_and_the_log_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = stage_config(tiny_variant(tmp_path, "llama"))
    monkeypatch.setenv("RAYLOOM_KERNELS", "reference")
    with caplog.at_level(logging.INFO, LOGGER):
        (rank,) = load_stages(config)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("kernels")]
    assert lines == ["kernels: reference on cpu, float32, linear in float64"]
    assert rank.loaded.model.kernels.target.backend == "reference"
    monkeypatch.setenv("RAYLOOM_KERNELS", "fast")
    with pytest.raises(ConfigError, match="RAYLOOM_KERNELS: 'fast' is not a kernel backend"):
        load_stages(config)


def test_a_backend_may_plan_attention_in_its_own_way(tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "mistral-window")
    shape = read_shape(folder)
    kernels = cpu_kernels()
    reference = cpu_kernels(backend="reference")
    windows: list[int | None] = []

    class Plan:
        __slots__ = ("inner",)

        def __init__(self, inner: AttentionPlan) -> None:
            self.inner = inner

        def attend(
            self,
            query_THD: torch.Tensor,
            pages: torch.Tensor,
            scale: float,
            *,
            soft_cap: float | None = None,
            sinks_H: torch.Tensor | None = None,
        ) -> torch.Tensor:
            return self.inner.attend(query_THD, pages, scale, soft_cap=soft_cap, sinks_H=sinks_H)

    def plan_attention(
        batch: AttentionBatch, *, num_heads: int, pages: torch.Tensor, window: int | None, compute_dtype: torch.dtype
    ) -> Plan:
        windows.append(window)
        inner = reference.plan_attention(
            batch, num_heads=num_heads, pages=pages, window=window, compute_dtype=compute_dtype
        )
        return Plan(inner)

    mixed = dataclasses.replace(kernels, plan_attention=plan_attention)
    logits = logits_of(load_model(folder, shape, mixed, dtype=torch.float32).model)
    torch.testing.assert_close(logits, logits_of(load_tiny(folder)), atol=1e-4, rtol=0)
    assert windows == [8] * 3, "one plan for each window and step"


class GroupedInt8:
    """Weights in groups of GROUP input columns, with a scale for each group. `finish` dequantises them."""

    def __init__(self, spec: LinearSpec) -> None:
        assert spec.num_inputs % GROUP == 0, "the model cuts between groups"
        self._spec = spec
        self._values = torch.empty(spec.num_outputs, spec.num_inputs, dtype=torch.int8)
        self._scales = torch.empty(spec.num_outputs, spec.num_inputs // GROUP)
        self._weight: torch.Tensor | None = None

    def destinations(self) -> dict[str, Destination]:
        found = {}
        start = 0
        columns = self._spec.inputs.indices
        groups = slice(columns.start // GROUP, columns.stop // GROUP)
        for name, rows in self._spec.outputs.items():
            end = start + len(rows)
            found[f"{name}.qweight"] = Destination(self._values[start:end], (rows.slice, self._spec.inputs.slice))
            found[f"{name}.scales"] = Destination(self._scales[start:end], (rows.slice, groups))
            start = end
        return found

    def finish(self) -> None:
        self._weight = self._values.float() * self._scales.repeat_interleave(GROUP, dim=1)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        assert self._weight is not None
        return x @ self._weight.T

    @property
    def num_bytes(self) -> int:
        return self._values.nbytes + self._scales.nbytes


class GroupedInt8Schemes(DenseSchemes):
    cut_unit = GROUP

    def linear(self, spec: LinearSpec) -> WeightScheme:  # type: ignore[override]
        return GroupedInt8(spec)


def fill(model: CausalLM, destinations: dict[str, Destination], tensors: dict[str, torch.Tensor]) -> None:
    for name, destination in destinations.items():
        tensor = tensors[name]
        destination.tensor.copy_(tensor[destination.part] if destination.part else tensor)
    for scheme in model.schemes:
        scheme.finish()


def quantised(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The folder's checkpoint with grouped int8 matrices, and the checkpoint with these matrices dequantised."""
    stored: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dim() == 1 or "embed" in name:
            stored[name] = exact[name] = tensor
            continue
        grouped = tensor.view(tensor.shape[0], -1, GROUP)
        scales = grouped.abs().amax(dim=-1) / 127
        values = (grouped / scales[..., None]).round().to(torch.int8)
        stored[name.replace(".weight", ".qweight")] = values.view(tensor.shape)
        stored[name.replace(".weight", ".scales")] = scales
        exact[name] = (values.float() * scales[..., None]).view(tensor.shape)
    return stored, exact


def test_a_quantised_format_needs_no_other_layer_and_no_other_loader(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, intermediate_size=80)
    shape = read_shape(folder)
    kernels = cpu_kernels()
    stored, exact = quantised(folder)
    cpu = torch.device("cpu")
    part = whole_part(shape.num_layers)
    ours, destinations = empty_model(shape, part, kernels, GroupedInt8Schemes(kernels.linear, torch.float32, cpu))
    fill(ours, destinations, stored)
    dense, destinations = empty_model(shape, part, kernels)
    fill(dense, destinations, exact)
    torch.testing.assert_close(logits_of(ours), logits_of(dense), atol=1e-4, rtol=0)
    assert ours.weight_bytes < 0.5 * dense.weight_bytes


def test_tensor_parallelism_cuts_a_quantised_format_between_its_groups(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, intermediate_size=80)  # 5 groups
    shape = read_shape(folder)
    kernels = cpu_kernels()
    stored, exact = quantised(folder)
    schemes = GroupedInt8Schemes(kernels.linear, torch.float32, torch.device("cpu"))
    x = torch.randn(3, shape.hidden_size)
    total = torch.zeros(3, shape.hidden_size)
    widths = []
    for index in range(2):
        part = ModelPart(whole_model(shape.num_layers), Shard(index, 2))
        model, destinations = empty_model(shape, part, kernels, schemes)
        fill(model, destinations, stored)
        mlp = model._weights.layers[0].mlp
        widths.append(mlp.gate_up(x).shape[1] // 2)
        total += mlp(x)
    gate, up, down = (exact[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    expected = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    assert widths == [32, 48]
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=0)
