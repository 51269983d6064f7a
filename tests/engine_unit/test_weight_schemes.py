"""Dense weight schemes: the parts of the checkpoint that a rank loads, and the product before and after packing."""

from __future__ import annotations

import pytest
import torch

from rayloom_engine.layers.linear import Linear
from rayloom_engine.layers.linear_spec import AxisPart, LinearSpec
from rayloom_engine.layers.schemes.dense import DenseScheme, DenseSchemes
from rt_tiny import cpu_kernels


def whole(size: int) -> AxisPart:
    return AxisPart(range(size), size)


def make_scheme(spec: LinearSpec, backend="auto") -> DenseScheme:
    return DenseSchemes(cpu_kernels(backend=backend).linear, torch.float32, torch.device("cpu")).linear(spec)


def parts(scheme: DenseScheme) -> dict[str, tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Name -> sizes of the destination, part of the checkpoint's tensor."""
    return {name: (tuple(found.tensor.shape), found.part) for name, found in scheme.destinations().items()}


def fill(scheme: DenseScheme, tensors: dict[str, torch.Tensor]) -> None:
    for name, destination in scheme.destinations().items():
        tensor = tensors[name]
        destination.tensor.copy_(tensor[destination.part] if destination.part else tensor)


def test_fused_matrices_are_loaded_below_each_other() -> None:
    spec = LinearSpec(outputs={"q": whole(6), "k": whole(2)}, inputs=whole(4), has_bias=True)
    scheme = make_scheme(spec)
    assert parts(scheme) == {
        "q.weight": ((6, 4), ()),
        "q.bias": ((6,), ()),
        "k.weight": ((2, 4), ()),
        "k.bias": ((2,), ()),
    }
    assert scheme.num_bytes == (8 * 4 + 8) * 4


def test_a_shard_loads_its_rows_or_its_columns_alone() -> None:
    rows = make_scheme(LinearSpec(outputs={"gate": AxisPart(range(3, 7), 8)}, inputs=whole(4), has_bias=True))
    assert parts(rows) == {"gate.weight": ((4, 4), (slice(3, 7),)), "gate.bias": ((4,), (slice(3, 7),))}
    columns = make_scheme(LinearSpec(outputs={"down": whole(4)}, inputs=AxisPart(range(3, 7), 8), has_bias=True))
    assert parts(columns) == {"down.weight": ((4, 4), (slice(0, 4), slice(3, 7))), "down.bias": ((4,), ())}


@pytest.mark.parametrize("backend", ["auto", "plain", "reference"])
def test_the_sum_over_shards_is_the_product_of_the_whole_matrix(backend) -> None:
    torch.manual_seed(0)
    tensors = {"down.weight": torch.randn(16, 24), "down.bias": torch.randn(16)}
    x = torch.randn(5, 24)
    total = torch.zeros(5, 16)
    for shard in range(2):
        columns = AxisPart(range(12 * shard, 12 * shard + 12), 24)
        scheme = make_scheme(
            LinearSpec(outputs={"down": whole(16)}, inputs=columns, has_bias=shard == 0), backend=backend
        )
        fill(scheme, tensors)
        num_bytes = scheme.num_bytes
        scheme.finish()
        assert scheme.num_bytes == num_bytes
        total += Linear(scheme)(x[:, columns.slice])
    expected = x.double() @ tensors["down.weight"].double().T + tensors["down.bias"]
    torch.testing.assert_close(total, expected.float(), atol=1e-4, rtol=0)


def test_a_plain_kernel_keeps_the_loaded_weight() -> None:
    scheme = make_scheme(LinearSpec(outputs={"o": whole(4)}, inputs=whole(4)), backend="plain")
    weight = scheme.weight
    scheme.finish()
    assert scheme.weight is weight


def test_a_tied_matrix_keeps_its_layout_and_belongs_to_its_other_user() -> None:
    torch.manual_seed(0)
    embedding, x = torch.randn(32, 16), torch.randn(3, 16)
    scheme = DenseSchemes(cpu_kernels().linear, torch.float32, torch.device("cpu")).tied(embedding)
    before = embedding.clone()
    scheme.finish()
    assert scheme.weight is embedding and torch.equal(embedding, before)
    assert (scheme.destinations(), scheme.num_bytes) == ({}, 0)
    torch.testing.assert_close(scheme.apply(x), x @ embedding.T, atol=1e-4, rtol=0)
