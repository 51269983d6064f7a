"""`make kernels`: planted faults in real machine code, the choice of rows, and the table on file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("triton")  # optional: the engine needs it only on GPUs

import triton
import triton.language as tl

from kernel_gate.__main__ import check
from kernel_gate.compiler import compiled_figures
from kernel_gate.machine_code import Figures, amd_figures, nvidia_figures
from kernel_gate.rows import Row, all_rows, rows_to_compile, source_version
from kernel_gate.table import TABLE, read_table
from kernel_gate.verdict import problems
from rayloom_engine.kernels.triton.shipped import Gpu, Shipped

FINE = Figures(registers=64, spilled_bytes=0, shared_bytes=1024, matrix="HMMA 4", async_copies=2)


@triton.jit
def _square(x):
    return x * x


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, size, TILE: tl.constexpr):
    rows = tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for begin in range(0, size, TILE):
        a = tl.load(a_ptr + rows[:, None] * 4096 + begin + rows[None, :])
        b = tl.load(b_ptr + (begin + rows)[:, None] * 4096 + rows[None, :])
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(out_ptr + rows[:, None] * TILE + rows[None, :], _square(total))


@triton.jit
def share_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    """Divides each element by the sum, so it holds all elements until the sum is known."""
    places = tl.arange(0, SIZE)
    x = tl.load(x_ptr + places)
    tl.store(out_ptr + places, x / tl.sum(x, 0))


def product(*, tile: int, num_warps: int, num_stages: int, element: str = "*fp16") -> Shipped:
    return Shipped(
        name="product",
        kernel=product_kernel,
        signature={"a_ptr": element, "b_ptr": element, "out_ptr": "*fp32", "size": "i32"},
        constants={"TILE": tile},
        num_warps=num_warps,
        num_stages=num_stages,
        multiplies_matrices=True,
        copies_asynchronously=True,
    )


def compiled_problems(shipped: Shipped, gpu: Gpu) -> str:
    return "\n".join(problems(shipped, gpu, compiled_figures(shipped, gpu), None))


@pytest.fixture(autouse=True)
def cache_of_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


@pytest.mark.parametrize("gpu", ["sm_80", "gfx942"])
def test_a_sound_kernel_has_no_problems(gpu: Gpu) -> None:
    assert compiled_problems(product(tile=32, num_warps=4, num_stages=3), gpu) == ""


def test_a_kernel_that_spills_is_found() -> None:
    shares = Shipped(
        name="shares",
        kernel=share_kernel,
        signature={"x_ptr": "*fp32", "out_ptr": "*fp32"},
        constants={"SIZE": 8 * 1024},  # 256 elements in each thread of a warp
        num_warps=1,
        num_stages=1,
    )
    assert "of each thread spill to memory" in compiled_problems(shares, "sm_80")
    assert compiled_problems(dataclasses.replace(shares, num_warps=8), "sm_80") == ""


def test_too_much_shared_memory_is_found() -> None:
    found = compiled_problems(product(tile=64, num_warps=4, num_stages=12), "sm_80")
    assert "bytes of shared memory, and the GPU has 166,912" in found


def test_products_without_matrix_instructions_are_found() -> None:
    found = compiled_problems(product(tile=32, num_warps=4, num_stages=3, element="*fp32"), "sm_80")
    assert "product on sm_80: no matrix instruction" in found


def test_loads_that_are_no_asynchronous_copies_are_found() -> None:
    assert "no asynchronous copy" in compiled_problems(product(tile=32, num_warps=4, num_stages=1), "sm_80")
    unaligned = dataclasses.replace(
        product(tile=32, num_warps=4, num_stages=3), unaligned=frozenset(("a_ptr", "b_ptr"))
    )
    assert "no asynchronous copy" in compiled_problems(unaligned, "sm_80")


@triton.jit
def early_kernel(x_ptr, out_ptr, STARTS_EARLY: tl.constexpr, FAULT: tl.constexpr):
    places = tl.arange(0, 128)
    if FAULT == "reads before the wait":
        x = tl.load(x_ptr + places)
    if FAULT == "lets its successor start first":
        tl.extra.cuda.gdc_launch_dependents()
    if FAULT != "no wait":
        tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    if FAULT != "reads before the wait":
        x = tl.load(x_ptr + places)
    tl.store(out_ptr + places, x)


def early(fault: str, *, reads_weights_early: bool = False) -> Shipped:
    return Shipped(
        name="early",
        kernel=early_kernel,
        signature={"x_ptr": "*fp32", "out_ptr": "*fp32"},
        constants={"STARTS_EARLY": True, "FAULT": fault},
        num_warps=4,
        num_stages=1,
        gpus=("sm_90", "sm_100"),
        reads_weights_early=reads_weights_early,
    )


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("no wait", "does not wait for its predecessor before its successor may start"),
        (
            "lets its successor start first",
            "does not wait for its predecessor before its successor may start",
        ),
        ("reads before the wait", "the kernel has LDG before it waits for its predecessor"),
    ],
)
def test_a_kernel_that_starts_early_without_waiting_in_time_is_found(fault: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        compiled_figures(early(fault), "sm_90")


def test_weights_may_be_read_before_the_wait() -> None:
    compiled_figures(early(""), "sm_90")
    compiled_figures(early("reads before the wait", reads_weights_early=True), "sm_90")


def test_a_kernel_that_does_not_compile_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = product(tile=24, num_warps=4, num_stages=1)  # not a power of two
    found = check([Row(shipped=wrong, gpu="sm_80")], tmp_path / "t.csv", is_all=True, record=False, seed=0)
    assert [sentence.partition(": Comp")[0] for sentence in found] == ["product on sm_80: does not compile"]


def test_figures_of_nvidia_are_read_from_its_tools() -> None:
    usage = " Function k:\n  REG:154 STACK:8 SHARED:1024 LOCAL:16 CONSTANT[0]:624"
    code = "HGMMA.64x128x16.F32 R24, gdesc[UR4]\nHMMA.16816 R1\n HGMMA.64 R2\nLDGSTS.E.BYPASS.128 [R2]\nLDG.E R3\n"
    assert nvidia_figures(usage, code, 4096) == Figures(
        registers=154, spilled_bytes=24, shared_bytes=4096, matrix="HGMMA 2+HMMA 1", async_copies=1
    )
    with pytest.raises(ValueError, match="printed no figures: 'cuobjdump fatal'"):
        nvidia_figures("cuobjdump fatal", code, 0)


def test_figures_of_amd_are_read_from_assembly() -> None:
    assembly = """
        v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], 0
        buffer_load_dwordx4 v1, s[4:7], 0 offen lds
        buffer_load_dwordx4 v[1:4], v5, s[4:7], 0 offen
        .private_segment_fixed_size: 12
        .vgpr_count:     219
        .vgpr_spill_count: 3
    """
    assert amd_figures(assembly, 512) == Figures(
        registers=219, spilled_bytes=12, shared_bytes=512, matrix="MFMA 1", async_copies=1
    )


def test_rows_that_changed_are_compiled_with_a_tenth_of_the_others() -> None:
    shipped = product(tile=32, num_warps=4, num_stages=3)
    rows = [Row(shipped=dataclasses.replace(shipped, name=f"k{number:02}"), gpu="sm_80") for number in range(21)]
    versions = {row.key: "3.7/new" for row in rows}
    recorded = {row.key: "3.7/new" for row in rows} | {rows[7].key: "3.6/new"}
    chosen = rows_to_compile(rows, recorded, versions, seed=3)
    assert len(chosen) == 3
    assert rows[7] in chosen
    assert chosen == rows_to_compile(rows, recorded, versions, seed=3)
    assert {tuple(map(id, rows_to_compile(rows, recorded, versions, seed))) for seed in range(5)} != {
        tuple(map(id, chosen))
    }


def test_a_version_follows_code_and_configuration() -> None:
    shipped = product(tile=32, num_warps=4, num_stages=3)
    versions = {
        source_version(shipped),
        source_version(dataclasses.replace(shipped, num_stages=2)),
        source_version(dataclasses.replace(shipped, constants={"TILE": 64})),
        source_version(dataclasses.replace(shipped, signature={**shipped.signature, "size": "i64"})),
        source_version(dataclasses.replace(shipped, unaligned=frozenset(("a_ptr",)))),
    }
    assert len(versions) == 5
    assert source_version(shipped) == source_version(dataclasses.replace(shipped, name="other"))


def test_a_version_follows_the_functions_that_a_kernel_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = product(tile=32, num_warps=4, num_stages=3)
    before = source_version(shipped)
    monkeypatch.setattr(_square, "_src", _square.src.replace("return", "# A comment.\n    return"))
    assert source_version(shipped) == before
    monkeypatch.setattr(_square, "_src", _square.src.replace("x * x", "x + x"))
    assert source_version(shipped) != before


def test_figures_on_file_are_compared_and_replaced_on_demand(tmp_path: Path) -> None:
    table = tmp_path / "kernels.csv"
    shipped = product(tile=32, num_warps=4, num_stages=3)
    rows = [Row(shipped=shipped, gpu="sm_80"), Row(shipped=shipped, gpu="gfx942")]

    def run(figures: Figures, *, record: bool = False, of: list[Row] = rows) -> list[str]:
        return check(of, table, is_all=True, record=record, seed=0, compile_row=lambda _, gpu: figures)

    assert [sentence.partition(";")[0] for sentence in run(FINE)] == [
        "product on sm_80: no figures on file for this code",
        "product on gfx942: no figures on file for this code",
    ]
    assert run(FINE, record=True) == run(FINE) == []
    assert [
        sentence.partition(";")[0] for sentence in run(dataclasses.replace(FINE, matrix="HGMMA 4"), of=rows[:1])
    ] == [
        "product on gfx942: on file, but no longer shipped",
        "product on sm_80: matrix is 'HGMMA 4', on file 'HMMA 4'",
    ]
    assert run(FINE, record=True, of=rows[:1]) == []
    assert list(read_table(table)) == [("product", "sm_80")]


def test_every_shipped_kernel_is_on_file_for_its_present_code() -> None:
    entries = read_table(TABLE)
    rows = all_rows()
    assert {row.key for row in rows} == set(entries)
    sources = {key: entry.version.rpartition("/")[2] for key, entry in entries.items()}
    assert {row.key: source_version(row.shipped) for row in rows} == sources
