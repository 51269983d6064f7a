"""Reads the pickle of a saved tensor without unpickling: interprets the few instructions that such a pickle has.

Names are compared with a fixed list and never imported, and nothing is called. So the result consists of numbers, texts
and tuples, whatever the pickle contains. Any other instruction or name is refused.

The pickle of a tensor describes this call, with a reference to the storage in place of its elements:
_rebuild_tensor_v2(storage, offset, sizes, strides, requires_grad, OrderedDict()).
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from rayloom_engine.common.json_words import shown
from rayloom_engine.core.embeds import EmbedsType
from rayloom_engine.front.openai.embeds.archive import BadTensor

MAX_PICKLE_BYTES = 4096  # the pickle of a tensor has less than 300
_NUMBER_LIMIT = 2**63  # numbers of elements are smaller

_TENSOR: Final = ("torch._utils", "_rebuild_tensor_v2")
_DICT: Final = ("collections", "OrderedDict")
_STORAGES: dict[tuple[str, str], EmbedsType] = {
    ("torch", "FloatStorage"): "float32",
    ("torch", "BFloat16Storage"): "bfloat16",
    ("torch", "HalfStorage"): "float16",
}


@dataclass(frozen=True, slots=True)
class StorageRef:
    dtype: EmbedsType
    key: str  # name of the archive's member below data/
    num_elements: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """The description of a tensor. Sizes, strides and offset are counted in elements, and not yet compared."""

    storage: StorageRef
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Name:
    """An allowed name, which is never imported."""

    path: tuple[str, str]


_MARK = object()
_EMPTY_DICT = object()  # the hooks of a tensor


@dataclass(slots=True)
class _Machine:
    """Stack and memo of the pickle's instructions."""

    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def pop(self) -> Any:
        if not self.stack:
            raise BadTensor("its pickle is damaged")
        return self.stack.pop()

    def pop_many(self, num: int) -> tuple[Any, ...]:
        return tuple(reversed([self.pop() for _ in range(num)]))

    def pop_to_mark(self) -> tuple[Any, ...]:
        items: list[Any] = []
        while (item := self.pop()) is not _MARK:
            items.append(item)
        return tuple(reversed(items))

    def put(self, key: int) -> None:
        if not self.stack:
            raise BadTensor("its pickle is damaged")
        self.memo[key] = self.stack[-1]

    def get(self, key: int) -> Any:
        if key not in self.memo:
            raise BadTensor("its pickle is damaged")
        return self.memo[key]


def read_tensor_pickle(data: bytes) -> SavedTensor:
    """Returns the description of the tensor in a pickle of at most MAX_PICKLE_BYTES. Raises BadTensor."""
    assert len(data) <= MAX_PICKLE_BYTES
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                break
            step = _STEPS.get(opcode.name)
            if step is None:
                raise BadTensor(f"its pickle has the instruction {opcode.name}; save one tensor alone")
            step(machine, argument)
    except BadTensor:
        raise
    except (ValueError, UnicodeError, OverflowError, IndexError) as error:  # of genops
        raise BadTensor("its pickle is damaged") from error
    result = machine.stack[-1] if machine.stack else None
    if not isinstance(result, SavedTensor):
        raise BadTensor("it does not contain a tensor alone; save one tensor, not a list, a dict or a Parameter")
    return result


def _name(module: object, name: object) -> _Name:
    if not isinstance(module, str) or not isinstance(name, str):
        raise BadTensor("its pickle is damaged")
    path = (module, name)
    if path not in (_TENSOR, _DICT, *_STORAGES):
        raise BadTensor(
            f"its pickle has the name {shown(f'{module}.{name}')}; save one dense tensor of float32, bfloat16 or "
            "float16"
        )
    return _Name(path)


def _stack_global(machine: _Machine) -> None:
    module, name = machine.pop_many(2)
    machine.stack.append(_name(module, name))


def _global(machine: _Machine, argument: str) -> None:
    module, _, name = argument.partition(" ")
    machine.stack.append(_name(module, name))


def _persistent(machine: _Machine) -> None:
    match machine.pop():
        case ("storage", _Name(path), str(key), str(), int(num_elements)) if path in _STORAGES:
            machine.stack.append(StorageRef(_STORAGES[path], key, num_elements))
        case _:
            raise BadTensor("its pickle refers to something other than a tensor's storage")


def _reduce(machine: _Machine) -> None:
    name, arguments = machine.pop_many(2)
    match name, arguments:
        case _Name(path), () if path == _DICT:
            machine.stack.append(_EMPTY_DICT)
        case (
            _Name(path),
            (StorageRef() as storage, int(offset), tuple() as sizes, tuple() as strides, bool(), hooks),
        ) if path == _TENSOR and hooks is _EMPTY_DICT:
            # A bool is an int, too.
            if not all(type(number) is int for number in (storage.num_elements, offset, *sizes, *strides)):
                raise BadTensor("the sizes of its tensor are no integers")
            machine.stack.append(SavedTensor(storage, offset, sizes, strides))
        case _:
            raise BadTensor("its pickle describes no plain tensor; save a dense tensor with torch.save")


def _push(machine: _Machine, argument: Any) -> None:
    if isinstance(argument, int) and abs(argument) >= _NUMBER_LIMIT:
        raise BadTensor("its pickle has a number of more than 64 bits")
    machine.stack.append(argument)


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, argument: None),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), _push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE"), _push),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    "MARK": lambda machine, _: machine.stack.append(_MARK),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "TUPLE1": lambda machine, _: machine.stack.append(machine.pop_many(1)),
    "TUPLE2": lambda machine, _: machine.stack.append(machine.pop_many(2)),
    "TUPLE3": lambda machine, _: machine.stack.append(machine.pop_many(3)),
    "TUPLE": lambda machine, _: machine.stack.append(machine.pop_to_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda machine, key: machine.put(key)),
    "MEMOIZE": lambda machine, _: machine.put(len(machine.memo)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, key: machine.stack.append(machine.get(key))),
    "GLOBAL": _global,
    "STACK_GLOBAL": lambda machine, _: _stack_global(machine),
    "BINPERSID": lambda machine, _: _persistent(machine),
    "REDUCE": lambda machine, _: _reduce(machine),
}
