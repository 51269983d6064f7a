"""RopeParameters: the rotary embedding that a model's config.json describes, in any of its versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rayloom_engine.errors import ModelError, shown
from rayloom_engine.models.checkpoint.config_json import ConfigJson
from rayloom_engine.models.checkpoint.limits import MAX_POSITIONS, MAX_ROPE_FACTOR, MAX_ROPE_THETA

RopeKind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")

_FORMER_NAMES = {"su": "longrope"}
_SCALED_KINDS = ("linear", "dynamic", "yarn", "llama3")  # the kinds that must have a factor


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """Rotary embedding. After `rotated_share`, the comment on a group of fields names all kinds that use the group."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    rotated_share: float = 1.0  # rotated share of a head: its first elements; for "proportional" its fastest pairs
    factor: float = 1.0  # all kinds but "default": the number by which the context's length was multiplied
    # yarn, longrope, llama3: context length in training, before it was stretched; for "dynamic": the length in the
    # config
    original_max_position: int = 8192
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn: `beta_fast` and `beta_slow` are turns within the trained context
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True  # whether the bounds of the blend are rounded to whole pairs
    mscale: float = 0.0  # 0: not set
    mscale_all_dim: float = 0.0
    # yarn, longrope: cosines and sines are multiplied by this number; None: the kind has a formula for it
    attention_factor: float | None = None
    # longrope: a divisor for each pair
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    # dynamic, longrope: the longest context that an engine serves, which decides the frequencies of all its tokens
    context_len: int = 0

    @property
    def depends_on_context(self) -> bool:
        return self.kind in ("dynamic", "longrope")

    def rotary_dim(self, head_dim: int) -> int:
        """Returns the number of a head's first elements that are rotated."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.rotated_share)

    def for_context(self, context_len: int) -> RopeParameters:
        """Returns the embedding of an engine whose sequences have up to `context_len` tokens.

        All sequences of an engine have the same embedding, as in vLLM, because keys in the cache are already rotated.
        If a sequence shares keys, is replayed or grows, the cached keys must equal the keys that the sequence would
        write itself.
        """
        return dataclasses.replace(self, context_len=context_len) if self.depends_on_context else self


def longest_context(rope: RopeParameters, max_position_embeddings: int) -> int:
    """Returns the longest context of a model, from max_position_embeddings of config.json and the embedding's scaling.

    With "yarn", max_position_embeddings is the trained length in some configs and the stretched length in others. With
    "dynamic" it is the trained length, and with the other kinds the stretched length.
    """
    if rope.kind == "yarn":
        return min(MAX_POSITIONS, max(max_position_embeddings, int(rope.factor * rope.original_max_position)))
    if rope.kind == "dynamic":
        return min(MAX_POSITIONS, max(max_position_embeddings, int(rope.factor * max_position_embeddings)))
    return max_position_embeddings


def read_rope(
    config: ConfigJson,
    head_dim: int,
    max_position_embeddings: int,
    *,
    default: Mapping[str, Any] | None = None,
    default_theta: float = 10000.0,
) -> RopeParameters:
    """Reads rope_parameters of transformers 5, or rope_theta and rope_scaling of transformers 4. Raises ModelError.

    `default`: the object of a model whose config.json has neither rope_parameters nor rope_scaling.
    """
    parameters, former = config.mapping("rope_parameters"), config.mapping("rope_scaling")
    scaling = parameters or former or dict(default or {})
    found = read_one_rope(config, scaling, head_dim, max_position_embeddings, default_theta)
    if parameters and former:
        check_former(config, found, read_one_rope(config, former, head_dim, max_position_embeddings, default_theta))
    return found


def check_former(config: ConfigJson, found: RopeParameters, former: RopeParameters) -> None:
    """Raises ModelError if rope_parameters and rope_scaling give different embeddings.

    transformers prefers rope_scaling, and then takes none of the values of rope_parameters, not even rope_theta. So a
    user who adds rope_scaling to a file of transformers 5 gets an embedding that the model was not trained with.
    """
    if found != former:
        raise ModelError(
            f"{config.path}: rope_parameters and rope_scaling describe different rotary embeddings; write all values "
            "into rope_parameters, with rope_theta, and remove rope_scaling"
        )


def read_one_rope(
    config: ConfigJson,
    scaling: dict[str, Any],
    head_dim: int,
    max_position_embeddings: int,
    default_theta: float = 10000.0,
) -> RopeParameters:
    """Reads one rotary embedding. `scaling`: its object in config.json. The object's fields override `config`."""
    if any(isinstance(value, dict) for value in scaling.values()):
        raise ModelError(
            f"{config.path}: rope type 'one per layer type' is not supported for this architecture; "
            f"works: {', '.join(ROPE_KINDS)}",
            "Unsupported",
        )
    names = ("rope_theta", "partial_rotary_factor")
    outer = {name: config.get(name) for name in names}
    given = {name: value for name, value in scaling.items() if value is not None}
    rope = ConfigJson(path=config.path, values={**outer, **given})
    kind = _kind(rope)
    found = RopeParameters(
        theta=rope.number("rope_theta", default=default_theta, at_most=MAX_ROPE_THETA),
        kind=kind,
        rotated_share=_rotated_share(rope, head_dim),
        factor=rope.number("factor", default=None if kind in _SCALED_KINDS else 1.0, at_most=MAX_ROPE_FACTOR),
    )
    if kind in ("default", "linear", "proportional"):
        return found if kind != "default" else dataclasses.replace(found, factor=1.0)
    if kind == "dynamic":
        return dataclasses.replace(
            found,
            original_max_position=max_position_embeddings,
            context_len=longest_context(found, max_position_embeddings),
        )
    # Phi-3 has the trained length beside the object, and transformers prefers it to a length in the object.
    trained = config if config.get("original_max_position_embeddings") is not None else rope
    length = trained.count("original_max_position_embeddings", default=max_position_embeddings)
    found = dataclasses.replace(found, original_max_position=length)
    if kind == "llama3":
        return _llama3(found, rope)
    if kind == "yarn":
        return _yarn(found, rope)
    return _longrope(found, rope, head_dim, max_position_embeddings)


def _kind(rope: ConfigJson) -> RopeKind:
    given = rope.get("rope_type") or rope.get("type") or "default"
    name = _FORMER_NAMES.get(given, given) if isinstance(given, str) else given
    for kind in ROPE_KINDS:
        if kind == name:
            return kind
    raise ModelError(
        f"{rope.path}: rope type {shown(given)} is not supported; works: {', '.join(ROPE_KINDS)}", "Unsupported"
    )


def _rotated_share(rope: ConfigJson, head_dim: int) -> float:
    share = rope.number("partial_rotary_factor", default=1.0, at_most=1.0)
    rotated = int(head_dim * share)
    if rotated < 2 or rotated % 2:
        raise ModelError(
            f"{rope.path}: partial_rotary_factor {share:g} rotates {rotated} of {head_dim} elements of a head; "
            "works: an even number from 2 on",
            "Unsupported",
        )
    return share


def _llama3(found: RopeParameters, rope: ConfigJson) -> RopeParameters:
    low = rope.number("low_freq_factor", at_most=MAX_ROPE_FACTOR)
    high = rope.number("high_freq_factor", at_most=MAX_ROPE_FACTOR)
    if not low < high:
        raise ModelError(f"{rope.path}: low_freq_factor {low:g} must be less than high_freq_factor {high:g}")
    return dataclasses.replace(found, low_freq_factor=low, high_freq_factor=high)


def _yarn(found: RopeParameters, rope: ConfigJson) -> RopeParameters:
    if found.theta <= 1.0:
        raise ModelError(f"{rope.path}: rope_theta {found.theta:g} must be more than 1 for rope type 'yarn'")

    def optional(field: str) -> float:  # 0 means absent, as in transformers
        return rope.number(field, at_most=MAX_ROPE_FACTOR) if rope.get(field) else 0.0

    return dataclasses.replace(
        found,
        beta_fast=optional("beta_fast") or 32.0,
        beta_slow=optional("beta_slow") or 1.0,
        is_truncated=rope.flag("truncate") if "truncate" in rope.values else True,
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        attention_factor=_attention_factor(rope),
    )


def _longrope(found: RopeParameters, rope: ConfigJson, head_dim: int, max_position_embeddings: int) -> RopeParameters:
    factor = found.factor if rope.get("factor") is not None else max_position_embeddings / found.original_max_position
    return dataclasses.replace(
        found,
        factor=factor,
        short_factors=_factors(rope, "short_factor", found.rotary_dim(head_dim) // 2),
        long_factors=_factors(rope, "long_factor", found.rotary_dim(head_dim) // 2),
        attention_factor=_attention_factor(rope),
        context_len=max_position_embeddings,
    )


def _attention_factor(rope: ConfigJson) -> float | None:
    given = rope.get("attention_factor")
    return None if given is None else rope.number("attention_factor", at_most=MAX_ROPE_FACTOR)


def _factors(rope: ConfigJson, field: str, count: int) -> tuple[float, ...]:
    values = rope.get(field)
    if not isinstance(values, list) or len(values) != count:
        found = f"{len(values)} elements" if isinstance(values, list) else shown(values)
        raise ModelError(f"{rope.path}: {field} must be a list of {count} numbers, given {found}")
    pairs = ConfigJson(path=rope.path, values={f"{field}[{index}]": value for index, value in enumerate(values)})
    return tuple(pairs.number(name, at_most=MAX_ROPE_FACTOR) for name in pairs.values)
