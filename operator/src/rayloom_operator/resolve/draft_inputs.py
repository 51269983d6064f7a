"""The part of a sizing's inputs that follows from the draft model: its memory, and its identity for the hash. Pure."""

from __future__ import annotations

from typing import Any

from rayloom_operator.api.costs import ELEMENT_BYTES
from rayloom_operator.api.draft_facts import DraftFacts
from rayloom_operator.api.model_source import SourcedModel
from rayloom_operator.api.spec import LLMService
from rayloom_operator.resolve.question import DENSE, MAX_DRAFTED
from rayloom_operator.resolve.rank_memory import BLOCK_SIZE, DraftRoom


def draft_inputs(service: LLMService, facts: DraftFacts | None) -> dict[str, Any]:
    """Returns the fields of a Question for the draft model; none if the spec or the facts have no draft model."""
    model, args = service.spec.model, service.spec.engine.args
    draft = model.draft
    if draft is None or facts is None:
        return {}
    element_bytes = ELEMENT_BYTES[facts.checkpoint_dtype if model.dtype == "auto" else model.dtype]
    is_kept = service.spec.accelerator is None and weights_form(draft, model.dtype, draft.quantization) in (
        None,
        "auto",
    )
    costs = facts.costs
    room = DraftRoom(
        weights=costs.weights.bytes_at(0, element_bytes, keeps_quantised=is_kept),
        kv_block=costs.kv.bytes_at(0, element_bytes) * BLOCK_SIZE,
        token_bytes=costs.step.token.bytes_at(0, element_bytes),
        sequence_bytes=costs.step.sequence_bytes,
        num_drafted=args.num_speculative_tokens or MAX_DRAFTED,
    )
    return {
        "draft": room,
        "draft_source": draft.source,
        "draft_commit": facts.commit or draft.revision,
        "draft_quantization": None if draft.quantization == "auto" else draft.quantization,
        "num_drafted": args.num_speculative_tokens,
    }


def weights_form(model: SourcedModel, dtype: str, given: str | None) -> str | None:
    """Returns the form of a model's weights: the setting `given`, or DENSE.

    A GGUF file or a built-in model has dense weights if the spec gives a dtype. A model in float16 has dense weights,
    too, because the CPU library lacks float16.
    """
    is_gguf = model.is_gguf or model.source_kind == "builtin"
    is_dense = dtype == "float16" or (is_gguf and dtype != "auto")
    return DENSE if is_dense and given in (None, "auto") else given
