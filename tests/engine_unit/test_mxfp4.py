"""The reader of mxfp4 matrices, and the names of stacked experts. test_gpt_oss.py tests whole models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rayloom_engine.models.quantised.mxfp4 import Mxfp4Reader
from rayloom_engine.models.quantised.reader import StoredTensor
from rayloom_engine.models.stacked_experts import is_stacked, single_tensors, stacked_headers
from rt_mxfp4 import mxfp4

READER = Mxfp4Reader()
EXPERTS = "model.layers.1.mlp.experts"


def random_matrix(num_outputs: int, num_inputs: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(num_outputs)
    return {
        "blocks": random.integers(0, 256, (num_outputs, num_inputs // 32, 16), dtype=np.uint8),
        "scales": random.integers(110, 140, (num_outputs, num_inputs // 32), dtype=np.uint8),
    }


def test_a_byte_has_two_floats_the_lower_input_first() -> None:
    blocks = np.zeros((2, 1, 16), np.uint8)
    blocks[0, 0, :3] = [0x21, 0xF7, 0x80]
    blocks[1, 0, 15] = 0x30
    weights = READER.plain({"blocks": blocks, "scales": np.array([[128], [126]], np.uint8)})
    # 2 ** 1 times 0.5, 1, 6, -6, 0, -0; 2 ** -1 times 1.5 at the last input
    assert weights[0, :6].tolist() == [1.0, 2.0, 12.0, -12.0, 0.0, 0.0]
    assert weights[1].tolist() == [0.0] * 31 + [0.75]


def test_weights_are_those_of_transformers() -> None:
    tensors = random_matrix(48, 96)
    blocks, scales = (torch.from_numpy(tensors[name])[None] for name in ("blocks", "scales"))
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T.numpy()
    for weights in (READER.plain(tensors), READER.packed(tensors).plain()):
        np.testing.assert_array_equal(weights, expected)


@pytest.mark.parametrize("highest", [39, 127, 252])
def test_a_scale_is_exact_down_to_a_small_part_of_the_largest(highest: int) -> None:
    tensors = random_matrix(2, 128)
    tensors["scales"][:] = [[highest, highest - 39, highest - 1, highest]]
    np.testing.assert_array_equal(READER.packed(tensors).plain(), READER.plain(tensors))


def test_nearest_floats_of_a_matrix_are_read_again() -> None:
    stored, plain = mxfp4(torch.randn(16, 64))
    found = READER.packed({name: values.numpy() for name, values in stored.items()})
    np.testing.assert_array_equal(found.plain(), plain.numpy())


def test_a_nan_among_the_scales_is_refused() -> None:
    tensors = random_matrix(4, 64)
    tensors["scales"][2, 1] = 255
    for read in (READER.packed, READER.plain):
        with pytest.raises(ValueError, match=r"scales\[2, 1\] is 255, which means NaN; works: 0 to 254"):
            read(tensors)


def test_each_expert_has_tensors_of_its_own() -> None:
    weights = np.arange(2 * 3 * 8).reshape(2, 3, 8)  # 2 experts, 3 inputs, 4 outputs of gate and of up in turn
    found = dict(single_tensors(f"{EXPERTS}.gate_up_proj", weights))
    assert list(found) == [f"{EXPERTS}.{index}.{part}_proj.weight" for index in (0, 1) for part in ("gate", "up")]
    assert found[f"{EXPERTS}.0.gate_proj.weight"].tolist() == [[0, 8, 16], [2, 10, 18], [4, 12, 20], [6, 14, 22]]
    assert found[f"{EXPERTS}.1.up_proj.weight"][0].tolist() == [25, 33, 41]
    biases = dict(single_tensors(f"{EXPERTS}.gate_up_proj_bias", torch.arange(8).view(2, 4)))
    assert biases[f"{EXPERTS}.1.gate_proj.bias"].tolist() == [4, 6]
    down = dict(single_tensors(f"{EXPERTS}.down_proj", weights))
    assert down[f"{EXPERTS}.1.down_proj.weight"].tolist() == weights[1].T.tolist()
    blocks = dict(single_tensors(f"{EXPERTS}.down_proj_blocks", weights))
    assert blocks[f"{EXPERTS}.1.down_proj.blocks"].tolist() == weights[1].tolist()


def test_the_checkpoint_has_the_tensors_of_all_experts_in_one() -> None:
    headers = {"model.layers.1.mlp.router.weight": StoredTensor((2, 3))}
    for index in (0, 1):
        for part in ("gate", "up"):
            headers[f"{EXPERTS}.{index}.{part}_proj.weight"] = StoredTensor((4, 3))
            headers[f"{EXPERTS}.{index}.{part}_proj.bias"] = StoredTensor((4,))
        headers[f"{EXPERTS}.{index}.down_proj.blocks"] = StoredTensor((3, 1, 16), ("U8",))
    assert stacked_headers(headers) == {
        "model.layers.1.mlp.router.weight": StoredTensor((2, 3)),
        f"{EXPERTS}.gate_up_proj": StoredTensor((2, 3, 8)),
        f"{EXPERTS}.gate_up_proj_bias": StoredTensor((2, 8)),
        f"{EXPERTS}.down_proj_blocks": StoredTensor((2, 3, 1, 16), ("U8",)),
    }


@pytest.mark.parametrize(
    "name", [f"{EXPERTS}.3.gate_proj.weight", f"{EXPERTS}.gate_up_proj_scale", "model.layers.1.mlp.down_proj"]
)
def test_other_tensors_are_not_stacked(name: str) -> None:
    assert not is_stacked(name)
