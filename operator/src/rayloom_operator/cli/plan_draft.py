"""The draft model in `rayloom-operator plan`."""

from __future__ import annotations

from rayloom_operator.api.model import Model
from rayloom_operator.api.shipped_facts import vocabularies
from rayloom_operator.resolve.question import Question
from rayloom_operator.resolve.rank_memory import BLOCK_SIZE, in_words
from rayloom_operator.resolve.resolved import Resolved


def draft_lines(resolved: Resolved, asked: Question, *, is_shipped: bool) -> list[str]:
    """Returns the memory of the draft model, and what is not checked; nothing if the manifest has no draft model.

    `is_shipped`: the facts come with the operator, and not from an inspection, which compares the tokenizers.
    """
    model, facts = resolved.service.spec.model, resolved.draft
    draft = model.draft
    if draft is None or facts is None or asked.draft is None or resolved.sizing is None:
        return []
    kv = in_words(asked.draft.kv_block * (resolved.sizing.kv_tokens // BLOCK_SIZE))
    memory = (
        f"Draft model {draft.source}: {facts.num_parameters / 1e9:.2f} billion parameters. The rank that samples holds "
        f"all of it: {in_words(asked.draft.weights)} of weights, and {kv} for its part of the KV cache."
    )
    return [memory, *(_unchecked(model) if is_shipped and draft.source != model.source else [])]


def has_draft_of(new: Model, old: Model) -> bool:
    """True if facts of the model and draft model of `new` have those of the draft model of `old`, if it has one."""
    if old.draft is None:
        return True
    return new.draft is not None and (new.draft.source, new.draft.revision) == (old.draft.source, old.draft.revision)


def _unchecked(model: Model) -> list[str]:
    rows = vocabularies(model)
    differ = ""
    if rows is not None and rows[0] != rows[1]:
        differ = f" The model's vocabulary has {rows[0]} rows, and the draft model's has {rows[1]}."
    return [f"The tokenizers of the two models are not compared here; the inspection compares them.{differ}"]
