"""Compiles a configuration for a GPU that this machine need not have, and reads the figures of the machine code."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernel_gate.machine_code import Figures, amd_figures, check_early_start, nvidia_figures
from rayloom_engine.kernels.triton.shipped import Gpu, Shipped

VERSION: str = triton.__version__
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_TARGETS: dict[Gpu, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}


def compiled_figures(shipped: Shipped, gpu: Gpu) -> Figures:
    """Compiles as for a launch with aligned pointers, but specialises no integer. The compiler may raise any exception.

    A launch specialises integers that are 1 or divisible by 16, except integers that the kernel excludes.
    """
    names = shipped.kernel.arg_names
    signature = {name: shipped.signature.get(name, "constexpr") for name in names}
    aligned = [
        index for index, name in enumerate(names) if signature[name].startswith("*") and name not in shipped.unaligned
    ]
    source = ASTSource(
        fn=shipped.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in shipped.constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    options = {
        "num_warps": shipped.num_warps,
        "num_stages": shipped.num_stages,
        "enable_fp_fusion": shipped.fuses_products,
    }
    compiled = triton.compile(source, target=_TARGETS[gpu], options=options)
    shared_bytes = compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        return amd_figures(compiled.asm["amdgcn"], shared_bytes)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _output("cuobjdump", "-res-usage", file.name)
        code = _output("nvdisasm", "-c", file.name)
    if shipped.constants.get("STARTS_EARLY"):
        check_early_start(code, reads_weights_early=shipped.reads_weights_early)
    return nvidia_figures(usage, code, shared_bytes)


def _output(tool: str, *arguments: str) -> str:
    return subprocess.run([str(_TOOLS / tool), *arguments], capture_output=True, text=True, check=True).stdout
