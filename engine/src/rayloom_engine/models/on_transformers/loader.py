"""Copies weights from safetensors files into a model of transformers, tensor by tensor.

The parameters of transformers' modules may have other names and forms than the tensors of a checkpoint: experts are
stacked, or a prefix is missing. transformers has rules that convert names and forms. The loader first applies these
rules to the names in the files' headers. So a checkpoint that does not fit is refused before a weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from rayloom_engine.common.json_words import first_of
from rayloom_engine.errors import ModelError, word
from rayloom_engine.models.checkpoint.progress import Progress
from rayloom_engine.models.on_transformers.shard_cut import part_of
from rayloom_engine.models.on_transformers.shard_plan import Cut
from rayloom_engine.models.weight_files import weight_files
from rayloom_engine.parallel.shard import WHOLE, Shard

_MAX_NAMES = 5  # names in one message
_FLOAT_TYPES = ("BF16", "F16", "F32")


@dataclass(slots=True)
class _Target:
    """One or several tensors of the model, made from tensors of the files."""

    rule: Any  # transformers' rule that makes them
    sources: list[tuple[str, str]] = field(default_factory=list)  # (name in the files, pattern of the rule)


class WeightPlan:
    """The plan by which tensors of a checkpoint become tensors of a model. Made from the files' headers."""

    def __init__(self, folder: Path, model: Any) -> None:
        """Raises ModelError with the tensors' names if the files do not fit the model."""
        self._model = model
        self._names: dict[str, Path] = {}
        wrong: list[str] = []
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict: it cannot be iterated over)
                    self._names[name] = path
                    if tensors.get_slice(name).get_dtype() not in _FLOAT_TYPES:
                        wrong.append(name)
        self._wanted: dict[str, torch.Tensor] = model.state_dict()
        self._tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", {}))
        self._targets: dict[str, _Target] = {}
        self._used: set[str] = set()
        self._whole = model
        self._cuts: dict[str, Cut] = {}
        self._shard = WHOLE
        self._plan()
        self._check(folder, wrong)

    def cut(self, cuts: Mapping[str, Cut], shard: Shard) -> None:
        """Restricts `load` to the parameters and slices of one rank. Call it before `cut_to_shard`."""
        self._cuts = dict(cuts)
        self._shard = shard
        self._whole = deepcopy(self._model)  # on the meta device: rules that split tensors read the uncut sizes

    def load(self, dtype: torch.dtype, device: torch.device, progress: Progress) -> int:
        """Loads the weights, rounded to `dtype`, then to their type in the model. Returns the number of bytes read."""
        num_bytes_read = 0
        done = 0
        self._wanted = self._model.state_dict()
        total = sum(tensor.nbytes for tensor in self._wanted.values())
        filled: set[str] = set()
        open_files: dict[Path, Any] = {path: safe_open(path, framework="pt") for path in set(self._names.values())}
        progress("load", 0, total, "bytes")
        for first_name, target in self._targets.items():
            rule = target.rule
            if isinstance(rule, WeightRenaming) and first_name not in self._wanted:
                continue  # a bias that another rank adds
            of_sources = source_cut(rule, self._cuts.get(first_name))
            for name, pattern in target.sources:
                stored = self._read(open_files[self._names[name]], name, of_sources)
                num_bytes_read += stored.nbytes
                rule.add_tensor(first_name, name, pattern, _given(stored.to(dtype)))
            for name, made in rule.convert(first_name, model=self._whole, config=self._whole.config).items():
                if name not in self._wanted:
                    continue
                tensor = made[0] if isinstance(made, list) else made
                cut = self._cuts.get(name) if of_sources is None else None
                self._place(name, tensor if cut is None else part_of(tensor, cut, self._shard), device)
                filled.add(name)
                done += self._wanted[name].nbytes
                progress("load", done, total, "bytes")
        self._finish(filled, device)
        return num_bytes_read

    def _read(self, tensors: Any, name: str, cut: Cut | None) -> torch.Tensor:
        """Returns a tensor of a file, or this rank's part of it."""
        if cut is None:
            whole: torch.Tensor = tensors.get_tensor(name)
            return whole
        stored = tensors.get_slice(name)
        size = stored.get_shape()
        axis = len(size) + cut.dim
        pieces = []
        for part in cut.ranges(size[axis], self._shard):
            indices = [slice(None)] * len(size)
            indices[axis] = slice(part.start, part.stop)
            pieces.append(stored[tuple(indices)])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=axis)

    def _plan(self) -> None:
        model = self._model
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        pattern_to_converter = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        prefix = model.base_model_prefix
        for name in sorted(self._names, key=_natural):
            renamed, pattern = rename_source_key(name, renamings, converters, prefix, self._wanted)
            if renamed not in self._wanted and name in self._wanted:
                renamed, pattern = name, None
            if renamed not in self._wanted:
                continue
            self._used.add(name)
            if pattern is None:
                self._targets.setdefault(renamed, _Target(WeightRenaming(name, renamed))).sources.append((name, name))
            else:
                rule = deepcopy(pattern_to_converter[pattern])
                self._targets.setdefault(renamed, _Target(rule)).sources.append((name, pattern))

    def _check(self, folder: Path, wrong: list[str]) -> None:
        made = set(self._targets)
        for first_name, target in self._targets.items():
            if isinstance(target.rule, WeightConverter):
                first, *others = target.rule.target_patterns
                made |= {first_name.replace(first, other) for other in others}
        required = {name for name, _ in self._model.named_parameters()} - self._tied.keys()
        missing = sorted(name for name in required if name not in made)
        wrong = [name for name in wrong if name in self._used]
        wrong += [
            name
            for name, target in self._targets.items()
            if isinstance(target.rule, WeightRenaming) and self._size(target) != list(self._wanted[name].shape)
        ]
        problems = [
            f"{label}: {first_of(names, _MAX_NAMES, word)}"
            for label, names in (("missing", missing), ("wrong", wrong))
            if names
        ]
        if problems:
            raise ModelError(
                f"{folder}: the weights do not fit config.json ({type(self._model).__name__}); " + "; ".join(problems)
            )

    def _size(self, target: _Target) -> list[int]:
        name, _ = target.sources[0]
        with safe_open(self._names[name], framework="pt") as tensors:
            size: list[int] = tensors.get_slice(name).get_shape()
        return size

    def _place(self, name: str, tensor: torch.Tensor, device: torch.device) -> None:
        wanted = self._wanted[name]
        if tensor.shape != wanted.shape:
            raise ModelError(f"{word(name)} is {list(tensor.shape)}, should be {list(wanted.shape)}")
        placed = tensor.to(device=device, dtype=wanted.dtype, copy=True)
        owner, _, leaf = name.rpartition(".")
        module = self._model.get_submodule(owner)
        if leaf in module._buffers:
            module._buffers[leaf] = placed
        else:
            module._parameters[leaf] = torch.nn.Parameter(placed, requires_grad=False)
        getattr(module, leaf)._is_hf_initialized = True

    def _finish(self, filled: set[str], device: torch.device) -> None:
        """Ties weights, and computes buffers that are in no checkpoint, such as the frequencies of rotary embedding.

        Calls the same methods of the model as transformers' own loader.
        """
        model = self._model
        missing = set(self._wanted) - filled
        model._move_missing_keys_from_meta_to_device(missing, {"": device}, None, None)
        model._initialize_missing_keys(False)
        model.tie_weights(missing_keys=missing, recompute_mapping=False)


def source_cut(rule: Any, cut: Cut | None) -> Cut | None:
    """Returns the cut for the files' tensors. If they have this cut, `rule` makes from them a tensor with `cut`.

    Returns None if there is no cut, or if the rule needs whole tensors.
    """
    if cut is None or isinstance(rule, WeightRenaming):
        return cut
    # A cut counts dimensions from the last. So it also fits a single expert, although a rule stacks the experts in a
    # new first dimension. A rule that joins gate and up joins their rows. So a cut of columns fits gate and up as it
    # is, but a cut of rows must be applied to gate and up separately.
    is_stack = [isinstance(each, MergeModulelist) and each.dim == 0 for each in rule.operations]
    is_join = [isinstance(each, Concatenate) and each.dim == 1 for each in rule.operations]
    if is_stack == [True] or (is_stack == [True, False] and is_join == [False, True] and cut.dim == -1):
        return cut
    if is_stack == [True, False] and is_join == [False, True] and cut.num_packed == len(rule.source_patterns):
        return Cut(cut.dim)
    return None


def _given(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Returns a key that sorts numbers in names by value, the order that transformers' rules for lists expect."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
