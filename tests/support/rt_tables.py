"""The sizes of the tables of a running operator: of its dictionaries, lists, sets and queues."""

import functools
from collections import Counter, deque
from collections.abc import Mapping

_OURS = ("rayloom_operator.", "prometheus_client.")
# Bounded caches, which fill with the first documents: `_NUM_READ` and `_MAX_EXAMPLES` in kube/packed.py.
_CACHES = frozenset({"PackedDict._read", "Packer._ends"})


def table_sizes(*roots):
    """Returns "Class.attribute" -> number of entries, over all objects of the operator that `roots` refer to.

    Tables inside tables count for the attribute of the outer table; the parts of a Kubernetes object do not count.
    Attributes that are empty are left out.
    """
    sizes, seen, waiting = Counter(), set(), list(roots)
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        for name, value in _attributes(found):
            table = f"{type(found).__name__}.{name}"
            if table not in _CACHES:
                waiting += _count(table, value, sizes)
    return {name: size for name, size in sizes.items() if size}


def _count(name, value, sizes):
    """Adds the entries of `value` to `sizes`. Returns the objects inside."""
    if isinstance(value, functools.partial):
        return _count(name, value.args, sizes)
    if hasattr(value, "__self__") and hasattr(value, "__func__"):
        return [value.__self__]
    if type(value).__module__.startswith(_OURS):
        return [value]
    is_object = isinstance(value, Mapping) and "metadata" in value
    if is_object or not isinstance(value, Mapping | list | set | frozenset | tuple | deque):
        return []
    sizes[name] += len(value)
    parts = value.values() if isinstance(value, Mapping) else value
    return [inner for part in list(parts) for inner in _count(name, part, sizes)]


def _attributes(found):
    yield from getattr(found, "__dict__", {}).items()
    for kind in type(found).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if hasattr(found, name):
                yield name, getattr(found, name)
