"""The values of `quantization_config`: schemes by name, and refusals that name field and value."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.errors import ConfigError, ModelError
from rayloom_engine.models.checkpoint.config_json import ConfigJson
from rayloom_engine.models.int8_shape import aligned_counts, check_groups
from rayloom_engine.models.quantised.read_scheme import read_scheme
from rayloom_engine.models.quantised.scheme import CheckpointScheme
from rayloom_engine.models.shape import read_shape
from rt_facts import make_shape
from rt_mxfp4 import CONFIG as MXFP4
from rt_quantised import FORMATS
from rt_tiny import tiny_checkpoint

PATH = Path("model/config.json")
INPUTS = {"hidden_size": 256, "intermediate_size": 512}
AWQ = FORMATS["awq"].config
GPTQ = FORMATS["gptq"].config
PACKED = FORMATS["pack-quantized"].config


def scheme_of(config: dict[str, Any], inputs: dict[str, int] | None = None) -> CheckpointScheme:
    sizes = inputs or INPUTS
    return read_scheme(ConfigJson(path=PATH, values={"quantization_config": config}), sizes, sizes)


def compressed(**changes: Any) -> dict[str, Any]:
    weights = {**PACKED["config_groups"]["group_0"]["weights"], **changes}
    return {**PACKED, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize(
    ("name", "label", "cut_unit"),
    [
        ("awq", "awq-int4-g32", 32),
        ("awq-64", "awq-int4-g64", 64),
        ("gptq-channel", "gptq-int4", 32),
        ("gptq-8", "gptq-int8-g32", 32),
        ("pack-asymmetric", "compressed-int4-g32", 32),
        ("int-quantized", "compressed-w8a8", 32),
        ("float-quantized", "compressed-fp8", 32),
        ("fp8", "fp8", 32),
        ("fp8-block", "fp8-block", 32),
    ],
)
def test_a_scheme_has_a_name_and_a_unit_of_cuts(name: str, label: str, cut_unit: int) -> None:
    scheme = scheme_of(dict(FORMATS[name].config))
    assert (scheme.label, scheme.cut_unit) == (label, cut_unit)
    assert scheme.reader("model.layers.3.mlp.down_proj") is not None
    assert scheme.reader("model.embed_tokens") is None and scheme.reader("lm_head") is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "hqq"},
            "quant_method hqq is not supported; works: awq, gptq, compressed-tensors, fp8, mxfp4, or a",
        ),
        ({}, "quant_method null is not supported"),
        ({**AWQ, "version": "gemv"}, "version gemv is not supported; works: gemm"),
        ({**AWQ, "bits": 3}, "bits 3 is not supported; works: 4"),
        ({**AWQ, "zero_point": False}, "zero_point false is not supported; works: true"),
        ({**AWQ, "group_size": 16}, "group_size 16 is not supported; works: multiples of 32, or -1 for all inputs"),
        ({**AWQ, "group_size": 96}, "group_size 96 is not supported; works: a divisor of hidden_size, which is 256"),
        ({**AWQ, "modules_to_not_convert": ["*"]}, r"modules_to_not_convert \* is not supported; works: names of"),
        ({**MXFP4, "modules_to_not_convert": ["["]}, r"modules_to_not_convert \[ is not supported; works: names of"),
        ({**GPTQ, "desc_act": True}, "desc_act true is not supported; works: false, because groups of inputs that"),
        ({**GPTQ, "bits": 2}, "bits 2 is not supported; works: 4, 8"),
        ({**GPTQ, "bits": "4"}, "bits 4 is not supported"),
        ({**GPTQ, "lm_head": True}, "lm_head true is not supported"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format marlin is not supported; works: gptq, gptq_v2"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt e5m2 is not supported; works: e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\] is not supported"),
        (compressed(num_bits=3), "bits 3 is not supported; works: 4, 8"),
        (compressed(actorder="group"), "actorder group is not supported; works: null, weight, static"),
        (compressed(strategy="tensor"), "format pack-quantized with strategy tensor is not supported; works: pack-"),
        ({**PACKED, "config_groups": {}}, "config_groups 0 groups is not supported; works: one group for all linear"),
        ({**PACKED, "config_groups": {"group_0": 3}}, "config_groups must be an object, given 3"),
        (
            {**PACKED, "transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}},
            r"transform_config R4 is not supported; works: rotations of weights alone, given .*input",
        ),
        ({**PACKED, "transform_config": {"config_groups": {"R4": {}}}}, "transform_config R4 is not supported"),
        ({**PACKED, "ignore": ["re:(a+)+b"]}, r"ignore \(a\+\)\+b is not supported; works: names of modules, and"),
        ({"quant_method": "gguf", "kinds": {"lm_head": "Q4_0"}}, "weight_block_size null is not supported"),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        scheme_of(config)
    assert str(error.value).startswith(f"{PATH}: ")


@pytest.mark.parametrize(
    ("ignored", "dense", "quantised"),
    [
        (["lm_head"], [], ["mlp.up_proj", "self_attn.q_proj"]),
        (["model.layers.0.mlp.up_proj"], ["mlp.up_proj"], ["mlp.down_proj"]),
        (["re:.*up_proj"], ["mlp.up_proj"], ["mlp.down_proj"]),
        ([r"re:.*\.mlp\..*"], ["mlp.up_proj", "mlp.down_proj"], ["self_attn.q_proj"]),
        (["re:.*self_attn.*_proj$"], ["self_attn.q_proj"], ["mlp.up_proj"]),
        (["re:model"], ["mlp.up_proj"], []),
    ],
)
def test_ignored_modules_are_dense(ignored: list[str], dense: list[str], quantised: list[str]) -> None:
    scheme = scheme_of({**PACKED, "ignore": ignored})
    assert [scheme.reader(f"model.layers.0.{name}") for name in dense] == [None] * len(dense)
    assert all(scheme.reader(f"model.layers.0.{name}") for name in quantised)


def test_the_order_of_quantisation_changes_nothing_in_one_group_of_all_inputs() -> None:
    scheme = scheme_of({**GPTQ, "desc_act": True, "group_size": -1})
    assert scheme.linear == scheme_of({**GPTQ, "group_size": -1}).linear


def test_rotations_that_are_in_the_weights_change_nothing() -> None:
    places = [{"location": "weight_output"}, {"location": "weight_input", "inverse": True}]
    for transforms in ({}, None, {"config_groups": {}}, {"config_groups": {"R1": {"apply": places}}}):
        assert scheme_of({**PACKED, "transform_config": transforms}) == scheme_of(PACKED)


def test_of_a_mxfp4_checkpoint_only_experts_are_quantised() -> None:
    scheme = scheme_of({**MXFP4, "modules_to_not_convert": ["model.layers.*.mlp.router", "layers.1.mlp.experts"]})
    assert (scheme.label, scheme.cut_unit) == ("mxfp4", 32)
    names = ("0.mlp.experts.5.gate_proj", "0.mlp.router", "0.self_attn.q_proj", "1.mlp.experts.5.gate_proj")
    assert [scheme.reader(f"model.layers.{name}") is None for name in names] == [False, True, True, True]


def test_modules_that_are_not_converted_are_dense() -> None:
    scheme = scheme_of({**AWQ, "modules_to_not_convert": ["mlp.gate", "layers.1."]})
    names = ("0.mlp.gate_proj", "1.mlp.up_proj", "0.mlp.up_proj")
    assert [scheme.reader(f"model.layers.{name}") is None for name in names] == [True, True, False]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(FORMATS)), st.data())
def test_any_value_is_read_or_refused(name: str, data: st.DataObject) -> None:
    config = json.loads(json.dumps(dict(FORMATS[name].config)))
    holder = config
    if "config_groups" in config and data.draw(st.booleans()):
        holder = config["config_groups"]["group_0"]["weights"]
    holder[data.draw(st.sampled_from([*holder, "ignore", "modules_to_not_convert", "sym"]))] = data.draw(JSON)
    try:
        scheme_of(config)
    except ModelError as error:
        assert str(PATH) in str(error)


def test_a_checkpoint_may_be_refused_for_its_sizes(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, hidden_size=72, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(AWQ)}))
    with pytest.raises(
        ModelError, match="group_size 32 is not supported; works: a divisor of hidden_size, which is 72"
    ):
        read_shape(folder)


def test_mxfp4_weights_are_refused_without_stacked_experts(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(MXFP4)}))
    with pytest.raises(ModelError, match="LlamaForCausalLM with weights quantised as mxfp4 is not supported; works"):
        read_shape(folder)


def test_ranks_cut_between_groups(tmp_path: Path) -> None:

    dense = dataclasses.replace(make_shape(), num_heads=24, head_dim=32, intermediate_size=512)
    shape = dataclasses.replace(dense, scheme=scheme_of({**AWQ, "group_size": 128}))
    # 24 heads of 32 are 6 groups of 128; 512 feed-forward inputs are 4 groups.
    assert aligned_counts(shape, range(1, 9)) == (1, 2, 3)
    assert aligned_counts(dense, range(1, 9)) == tuple(range(1, 9))
    with pytest.raises(
        ConfigError, match=r"4 ranks cannot cut .* \(awq-int4-g128\) between groups of 128 .* 1 or 2 or 3"
    ):
        check_groups(shape, 4)
    check_groups(shape, 3)
