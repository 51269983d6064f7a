"""A model of transformers on the meta device: modules whose weights take no memory, and their calls of attention.

The calls show properties that config.json does not have: the order of layers, and the heads, head sizes and window of
each layer. They also show whether the model computes anything that paged attention cannot compute.

Legend: T tokens of a step, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from rayloom_engine.errors import ModelError
from rayloom_engine.models.on_transformers.attention import ATTRIBUTE, IMPLEMENTATION, Scores, register

_NUM_TOKENS = 3
_MAX_REPLACED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """A call of one attention module."""

    module: str  # name of the attention module in the model
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    window: int | None

    @property
    def page_dim(self) -> int:
        """Size of a head in the KV cache, where keys and values have the same size."""
        return max(self.head_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class MetaModel:
    """A model whose weights have sizes and types, but no memory. `calls`: calls of attention in a step, in order."""

    model: Any
    calls: tuple[AttentionCall, ...]
    layer_list: str  # name of the model's list of layers
    returns_tuple: bool  # a layer returns a tuple that begins with the hidden states
    can_be_staged: bool  # the model also computes from hidden states alone, without token ids
    replaced: frozenset[type[torch.nn.Module]] = frozenset()  # modules that cannot run on the meta device

    @property
    def layers(self) -> torch.nn.ModuleList:
        found = self.model.get_submodule(self.layer_list)
        assert isinstance(found, torch.nn.ModuleList)
        return found


def build_meta_model(config: Any, model_class: type[PreTrainedModel], dtype: torch.dtype) -> MetaModel:
    """Returns the model of a configuration. If it cannot be served, raises ModelError, which names no file."""
    register()
    try:
        with torch.device("meta"):
            model = model_class._from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION).eval()
    except Exception as error:  # any code of transformers may run here
        raise ModelError(f"its modules cannot be made: {type(error).__name__}: {error}") from error
    if any(isinstance(module, torch.nn.Conv1d) for module in model.modules()):
        raise ModelError("it has convolutions over earlier tokens", "Unsupported")
    replaced: set[type[torch.nn.Module]] = set()
    recorder, can_be_staged = _record(model, replaced, may_replace=True)
    can_be_staged = can_be_staged and not getattr(config, "num_kv_shared_layers", 0)
    calls = tuple(recorder.calls)
    name = _layer_list(model, calls, config.num_hidden_layers)
    returns_tuple = model.get_submodule(name)[0] in recorder.with_tuples
    return MetaModel(model, calls, name, returns_tuple, can_be_staged, frozenset(replaced))


def calls_of_part(model: Any, meta: MetaModel) -> tuple[AttentionCall, ...]:
    """Returns the attention calls of `model` (`meta.model` cut to one rank). Raises ModelError if it cannot run."""
    recorder, _ = _record(model, set(meta.replaced), may_replace=False)
    return tuple(recorder.calls)


def _record(
    model: torch.nn.Module, replaced: set[type[torch.nn.Module]], *, may_replace: bool
) -> tuple[_Recorder, bool]:
    recorder = _Recorder()
    for name, module in model.named_modules():
        object.__setattr__(module, ATTRIBUTE, _Recorded(name, recorder))
    can_be_staged = _run(model, replaced, may_replace=may_replace)
    for module in model.modules():
        object.__delattr__(module, ATTRIBUTE)
    return recorder, can_be_staged


@dataclass(slots=True)
class _Recorder:
    calls: list[AttentionCall] = field(default_factory=list)
    with_tuples: set[torch.nn.Module] = field(default_factory=set)  # modules that return tuples


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Implements ModuleAttention: notes the sizes of the call, and returns a result of the right size."""

    name: str
    recorder: _Recorder

    def __call__(
        self, query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        num_tokens, num_heads, head_dim = query_THD.shape
        if key_TKD.shape[0] != num_tokens:
            raise ModelError("its attention reads keys beside those of its own tokens", "Unsupported")
        self.recorder.calls.append(
            AttentionCall(
                module=self.name,
                num_heads=num_heads,
                num_kv_heads=key_TKD.shape[1],
                head_dim=head_dim,
                value_dim=value_TKD.shape[-1],
                window=scores.window,
            )
        )
        return query_THD.new_empty((num_tokens, num_heads, value_TKD.shape[-1]))


def _run(model: Any, replaced: set[type[torch.nn.Module]], *, may_replace: bool) -> bool:
    """Runs a step on the meta device, which computes only sizes.

    A module whose sizes depend on values, such as the choice of experts, cannot run on the meta device. `replaced`: the
    types of such modules; a module of these types returns its input. With `may_replace`, the types of modules that fail
    are added to `replaced`, and the result says whether a step also runs on hidden states without token ids. Without
    `may_replace`, the result is False. Raises ModelError if the step cannot run.
    """
    inputs = {
        "input_ids": torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta"),
        "position_ids": torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta"),
        "attention_mask": torch.ones(1, _NUM_TOKENS, dtype=torch.int64, device="meta"),
        "use_cache": False,
    }
    recorder: _Recorder = getattr(model, ATTRIBUTE).recorder
    _replace(model, replaced)
    with _plain_rotation(model), torch.no_grad():
        for _ in range(_MAX_REPLACED):
            recorder.calls.clear()
            with _running(model, recorder.with_tuples) as running:
                try:
                    model(**inputs)
                    break
                except ModelError:
                    raise
                except Exception as error:
                    failed = type(running[-1])
                    if len(running) < 2 or failed in replaced or not may_replace:
                        raise ModelError(f"its modules cannot run: {type(error).__name__}: {error}") from error
            replaced.add(failed)
            _replace(model, {failed})
        calls = list(recorder.calls)
        can_be_staged = may_replace and _runs_on_hidden_states(model, inputs)
        recorder.calls = calls
    for module in model.modules():
        if type(module) in replaced:
            del module.forward
    return can_be_staged


def _replace(model: torch.nn.Module, types: Collection[type[torch.nn.Module]]) -> None:
    for module in model.modules():
        if type(module) in types:
            module.forward = _first_input


def _runs_on_hidden_states(model: Any, inputs: dict[str, Any]) -> bool:
    width = model.get_input_embeddings().weight.shape[1]
    embeddings = torch.zeros(1, _NUM_TOKENS, width, dtype=model.dtype, device="meta")
    try:
        model(**{**inputs, "input_ids": None, "inputs_embeds": embeddings})
    except Exception:  # noqa: BLE001 - any code of transformers may run here
        return False
    return True


def _first_input(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


@contextlib.contextmanager
def _running(model: torch.nn.Module, with_tuples: set[torch.nn.Module]) -> Iterator[list[torch.nn.Module]]:
    """Yields the list of modules whose calls have not returned, the innermost last. A call that raises is not removed.

    Adds the modules that return tuples to `with_tuples`.
    """
    running: list[torch.nn.Module] = []

    def before(module: torch.nn.Module, _: Any) -> None:
        running.append(module)

    def after(module: torch.nn.Module, _args: Any, output: Any) -> None:
        running.pop()
        if isinstance(output, tuple):
            with_tuples.add(module)

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(after))
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _plain_rotation(model: Any) -> Iterator[None]:
    """A context in which all rotary embeddings have the default type. Other types may read the values of positions."""
    kinds = [
        (module, module.rope_type) for module in model.modules() if isinstance(getattr(module, "rope_type", 0), str)
    ]
    for module, _ in kinds:
        module.rope_type = "default"
    try:
        yield
    finally:
        for module, kind in kinds:
            module.rope_type = kind


def _layer_list(model: torch.nn.Module, calls: tuple[AttentionCall, ...], num_layers: int) -> str:
    """Returns the name of the list of layers: the list in which each entry has an attention module."""
    for name, module in model.named_modules():
        is_long = isinstance(module, torch.nn.ModuleList) and len(module) == num_layers == len(calls)
        if is_long and all(call.module.startswith(f"{name}.{index}.") for index, call in enumerate(calls)):
            return str(name)
    raise ModelError(
        f"it calls attention {len(calls)} times for {num_layers} layers; each layer must call it once, in order",
        "Unsupported",
    )
