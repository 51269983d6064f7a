"""PeftConfig: the settings in an adapter_config.json that change what an adapter computes.

An adapter adds scale * B (A x) to the outputs of a matrix, with A [rank, inputs] and B [outputs, rank]. The scale is
lora_alpha / rank; with use_rslora it is lora_alpha / sqrt(rank). rank_pattern and alpha_pattern give some matrices
other values. As in PEFT, the keys of these patterns are regular expressions for the end of a matrix's name.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayloom_engine.errors import ModelError, shown
from rayloom_engine.models.checkpoint.config_json import ConfigJson, read_json

CONFIG = "adapter_config.json"
MOST_RANK = 256  # kMostRank in csrc/cpu/adapters.h
_MOST_ALPHA = 1e6
_MOST_PATTERNS = 4096
_MOST_PATTERN_CHARACTERS = 256
# Keys of a pattern are names of matrices, which need only these characters. A regular expression with other characters
# could take endless time to match.
_PATTERN = re.compile(r"[\w.^$\\-]+")

# Field -> the feature that it switches on. An adapter is refused if any of these fields is not empty.
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "modules_to_save": "matrices that replace the model's own (modules_to_save)",
    "lora_bias": "biases of B (lora_bias)",
    "fan_in_fan_out": "transposed matrices (fan_in_fan_out)",
    "layer_replication": "layers that are used several times (layer_replication)",
    "trainable_token_indices": "changed rows of the embedding (trainable_token_indices)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "target_parameters": "matrices of experts (target_parameters)",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA (use_bdlora)",
    "arrow_config": "Arrow (arrow_config)",
}

# Beginnings of init_lora_weights with which PEFT changes the model's own matrices before the training: it subtracts the
# first B A, or quantises them (LoftQ). The trained A and B belong to the changed matrices.
_RESIDUAL = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    rank: int
    alpha: float
    rank_pattern: Mapping[str, Any]
    alpha_pattern: Mapping[str, Any]
    is_rank_stabilised: bool
    base: str  # the model for which the adapter was made, by its name in the file; empty: the file names none

    def rank_of(self, matrix: str) -> int:
        """Returns the rank that the file gives a matrix, such as "model.layers.0.self_attn.q_proj"."""
        return int(_of_pattern(self.rank_pattern, matrix, self.rank))

    def scale_of(self, matrix: str, rank: int) -> float:
        alpha = float(_of_pattern(self.alpha_pattern, matrix, self.alpha))
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def read_peft_config(folder: Path) -> PeftConfig:
    """Returns the settings of the adapter in a folder. Raises ModelError if they are broken, or not supported."""
    path = folder / CONFIG
    if not path.exists():
        raise ModelError(
            f"{path} does not exist; a LoRA adapter is a folder with {CONFIG} and adapter_model.safetensors", "NotFound"
        )
    config = ConfigJson(path=path, values=read_json(path))
    kind = config.text("peft_type", "LORA")
    if kind != "LORA":
        raise ModelError(f"{path}: peft_type {shown(kind)} is not supported; works: LORA", "Unsupported")
    for field, what in _UNSUPPORTED.items():
        if config.get(field):
            raise ModelError(
                f"{path}: {field} is {shown(config.get(field))}, and {what} is not supported; train the adapter "
                "without it, or merge it into the model",
                "Unsupported",
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_RESIDUAL):
        raise ModelError(
            f"{path}: init_lora_weights is {shown(start)}, and such an adapter belongs to changed matrices of the "
            "model; save it with PEFT's path_initial_model_for_weight_conversion, or merge it into the model",
            "Unsupported",
        )
    bias = config.text("bias", "none")
    if bias != "none":
        raise ModelError(f"{path}: bias is {shown(bias)}, and biases are not supported; works: none", "Unsupported")
    return PeftConfig(
        rank=config.count("r", at_most=MOST_RANK),
        alpha=config.number("lora_alpha", at_most=_MOST_ALPHA),
        rank_pattern=_pattern(config, "rank_pattern", MOST_RANK),
        alpha_pattern=_pattern(config, "alpha_pattern", _MOST_ALPHA),
        is_rank_stabilised=config.flag("use_rslora"),
        base=config.text("base_model_name_or_path", ""),
    )


def _pattern(config: ConfigJson, field: str, most: float) -> dict[str, Any]:
    """Returns the pattern in a field. Raises ModelError for a key that is not allowed, or a value outside (0, most]."""
    found = config.mapping(field)
    if len(found) > _MOST_PATTERNS:
        raise ModelError(f"{config.path}: {field} has {len(found)} entries; works: up to {_MOST_PATTERNS}")
    entries = ConfigJson(path=config.path, values=found)
    for key in found:
        if len(key) > _MOST_PATTERN_CHARACTERS or not _PATTERN.fullmatch(key):
            raise ModelError(
                f"{config.path}: {field} has the key {shown(key)}; works: names of matrices", "Unsupported"
            )
        try:
            re.compile(key)
        except re.error as error:
            raise ModelError(f"{config.path}: {field}: {shown(key)} is no regular expression: {error}") from error
        entries.number(key, at_most=most)
    return found


def _of_pattern(pattern: Mapping[str, Any], matrix: str, otherwise: float) -> float:
    """Returns the value of the first key that matches the whole name of the matrix, or the end of the name after a dot.

    Returns `otherwise` if no key matches.
    """
    for key, value in pattern.items():
        if _at_the_end(key).fullmatch(matrix):
            return float(value)
    return otherwise


@functools.lru_cache(maxsize=2 * _MOST_PATTERNS)
def _at_the_end(key: str) -> re.Pattern[str]:
    """Returns the compiled key. Cached here, because Python's own cache is too small for a pattern with many keys."""
    return re.compile(rf"(.*\.)?({key})")
