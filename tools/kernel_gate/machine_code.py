"""Figures of compiled kernels, read from the output of NVIDIA's tools and from AMD's assembly. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

# NVIDIA: warp (mma), warp group (wgmma) and tensor memory (tcgen05). AMD: mfma.
_NVIDIA_MATRIX = re.compile(r"\b(UTC[A-Z]*MMA|HGMMA|QGMMA|IGMMA|HMMA|QMMA|IMMA|DMMA)\b")
_NVIDIA_COPIES = re.compile(r"\b(LDGSTS|UTMALDG|UBLKCP)\b")
_NVIDIA_ACCESSES = re.compile(r"\b(LDG|LDGSTS|UTMALDG|UBLKCP|LD|STG|ST|ATOM|ATOMG|RED|REDG)\b")
_AMD_MATRIX = re.compile(r"\bv_(s?mfma)_\w+")
_AMD_COPIES = re.compile(r"\b(?:global_load_lds|buffer_load)_\w+[^\n]*\blds\b|\bglobal_load_lds_\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one compiled kernel. An instruction counts once, however often it runs."""

    registers: int  # registers of a thread; AMD: vector and accumulation registers
    spilled_bytes: int  # bytes of a thread's registers that are spilled to memory
    shared_bytes: int  # bytes of shared memory of a program
    matrix: str  # matrix instructions, such as "HGMMA 24"; several kinds are joined by "+"; empty: none
    async_copies: int  # copies from memory to shared memory that bypass registers


def nvidia_figures(usage: str, code: str, shared_bytes: int) -> Figures:
    """Reads `cuobjdump -res-usage` and `nvdisasm -c`. Raises ValueError if cuobjdump's output has no figures."""
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump -res-usage printed no figures: {usage.strip()[:300]!r}")
    registers, stack, local = map(int, found.groups())
    return Figures(
        registers=registers,
        spilled_bytes=stack + local,
        shared_bytes=shared_bytes,
        matrix=_counts(_NVIDIA_MATRIX.findall(code)),
        async_copies=len(_NVIDIA_COPIES.findall(code)),
    )


def check_early_start(code: str, *, reads_weights_early: bool) -> None:
    """Raises ValueError if a kernel that may start before its predecessor has ended does not wait for it in time.

    `code`: of `nvdisasm -c`. The wait (ACQBULK) must come before every access to memory, except for weights, and before
    the signal that lets the next kernel start (PREEXIT).
    """
    wait, signal = code.find("ACQBULK"), code.find("PREEXIT")
    if wait < 0 or signal < wait:
        raise ValueError("the kernel does not wait for its predecessor before its successor may start")
    accesses = _NVIDIA_ACCESSES.findall(code[:wait])
    allowed = {"LDG"} if reads_weights_early else set()
    if not_allowed := sorted({*accesses} - allowed):
        raise ValueError(f"the kernel has {', '.join(not_allowed)} before it waits for its predecessor")


def amd_figures(assembly: str, shared_bytes: int) -> Figures:
    """Reads the assembly with its metadata. Raises ValueError if there is no metadata."""
    figures = {}
    for name in ("vgpr_count", "private_segment_fixed_size"):
        found = re.search(rf"^\s*\.{name}:\s+(\d+)", assembly, flags=re.M)
        if found is None:
            raise ValueError(f"the assembly has no .{name}")
        figures[name] = int(found[1])
    return Figures(
        registers=figures["vgpr_count"],
        # Other spills need no memory: scalar registers spill into vector registers, vector into accumulation registers.
        spilled_bytes=figures["private_segment_fixed_size"],
        shared_bytes=shared_bytes,
        matrix=_counts(name.upper() for name in _AMD_MATRIX.findall(assembly)),
        async_copies=len(_AMD_COPIES.findall(assembly)),
    )


def _counts(names: Iterable[str]) -> str:
    return "+".join(f"{name} {count}" for name, count in sorted(Counter(names).items()))
