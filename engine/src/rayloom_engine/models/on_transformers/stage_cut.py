"""Cuts a model of transformers to the layers of one pipeline stage.

Layers of other stages are replaced by modules that return their input. So the base model still runs its own code before
the layers, such as the code for rotary tables and masks. Hidden states of the previous stage replace the input of the
stage's first layer, and the output of the stage's last layer is sent to the next stage.

Legend: T tokens of the step, D model width.
"""

from __future__ import annotations

from typing import Any

import torch

from rayloom_engine.models.on_transformers.meta_model import MetaModel
from rayloom_engine.parallel.stage import Stage


class _OtherLayer(torch.nn.Module):
    """Stands for a layer of another stage: returns its input."""

    def __init__(self, returns_tuple: bool, layer_type: str | None) -> None:
        super().__init__()
        self._returns_tuple = returns_tuple
        self.attention_type = layer_type  # some base models read it to choose a mask

    def forward(self, *args: Any, **options: Any) -> Any:
        hidden_1TD = args[0] if args else options["hidden_states"]
        return (hidden_1TD, None, None) if self._returns_tuple else hidden_1TD


class _Absent(torch.nn.Module):
    """Stands for a matrix of another stage. Its empty weight is for transformers' code that initialises weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.empty(0)
        self.bias = None


class StageEnds:
    """The hidden states that enter and leave the layers of a stage in one step."""

    def __init__(self) -> None:
        self.received_1TD: torch.Tensor | None = None
        self.sent_1TD: torch.Tensor | None = None

    def replace_input(self, _: torch.nn.Module, args: Any, options: Any) -> tuple[Any, Any]:
        """Hook before the stage's first layer: replaces its input by the hidden states of the previous stage."""
        if args:
            return (self.received_1TD, *args[1:]), options
        return args, {**options, "hidden_states": self.received_1TD}

    def keep_output(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        """Hook after the stage's last layer: stores its output, the hidden states for the next stage."""
        self.sent_1TD = output[0] if isinstance(output, tuple) else output


def cut_to_stage(meta: MetaModel, stage: Stage) -> StageEnds:
    """Removes the modules whose weights the stage need not hold. Call it before the weights are loaded."""
    ends = StageEnds()
    if stage.count == 1:
        return ends
    model, layers = meta.model, meta.layers
    for index in range(len(layers)):
        if index not in stage.layers:
            layer_type = getattr(layers[index], "attention_type", None)
            layers[index] = _OtherLayer(meta.returns_tuple, layer_type)
    if not stage.is_first:
        layers[stage.layers[0]].register_forward_pre_hook(ends.replace_input, with_kwargs=True)
    if not stage.is_last:
        layers[stage.layers[-1]].register_forward_hook(ends.keep_output)
    is_tied = bool(model.all_tied_weights_keys)
    if not stage.is_last:
        _remove(model, model.get_output_embeddings())
        model.all_tied_weights_keys = {}
    if not stage.is_first and not (is_tied and stage.is_last):
        _remove(model, model.get_input_embeddings())
    return ends


def _remove(model: torch.nn.Module, removed: torch.nn.Module) -> None:
    for name, module in list(model.named_modules()):
        if module is removed:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, _Absent())
