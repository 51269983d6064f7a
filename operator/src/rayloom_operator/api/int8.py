"""The rules for int8 weights, of the model and of its draft model: only on CPU, and not in float16.

An engine has the same rules (`setting_conflicts.py`), so it would refuse such settings at its start.
"""

from __future__ import annotations

from collections.abc import Iterator

# CEL: True if the ranks compute on CPU.
ON_CPU_RULE = (
    "(!has(self.accelerator) && (!has(self.engine) || !has(self.engine.args) || !has(self.engine.args.device) || "
    "self.engine.args.device != 'cuda'))"
)
_NO_FLOAT16_RULE = "!has(self.model.dtype) || self.model.dtype != 'float16'"
OF_MODEL = "engine.args.quantization"
OF_DRAFT = "model.draft.quantization"
# Field of the spec -> CEL: True if the field is not int8.
_NOT_INT8_RULES = {
    OF_MODEL: "!has(self.engine) || !has(self.engine.args) || !has(self.engine.args.quantization) || "
    "self.engine.args.quantization != 'int8'",
    OF_DRAFT: "!has(self.model.draft) || !has(self.model.draft.quantization) || "
    "self.model.draft.quantization != 'int8'",
}


def int8_rules() -> Iterator[tuple[str, str]]:
    """Yields CEL rules of a spec, each with its message."""
    for field, is_not_int8 in _NOT_INT8_RULES.items():
        yield f"{is_not_int8} || {ON_CPU_RULE}", _on_cpu_in_words(field)
        yield f"{is_not_int8} || {_NO_FLOAT16_RULE}", _types_in_words(field)


def int8_problem(field: str, given: str | None, *, is_on_gpu: bool, dtype: str) -> str:
    """Returns a message if a field is int8 and the rest of the spec excludes that; else an empty text.

    `field`: OF_MODEL or OF_DRAFT. `given`: the field's value. `dtype`: that of the spec.
    """
    if given != "int8":
        return ""
    if is_on_gpu:
        return _on_cpu_in_words(field)
    return _types_in_words(field) if dtype == "float16" else ""


def _on_cpu_in_words(field: str) -> str:
    return (
        f"{field} int8 works on CPU only: remove it, or remove accelerator and engine.args.device cuda, as far as they "
        "are set"
    )


def _types_in_words(field: str) -> str:
    return (
        f"{field} int8 works with model.dtype auto, bfloat16 or float32, and model.dtype is float16: change one of "
        "the two"
    )
