"""The facts of a model and its draft model in the status: if they are those of the spec, and their commits. Pure."""

from __future__ import annotations

from rayloom_operator.api.model import Model
from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.model_source import SourcedModel
from rayloom_operator.api.status import InspectedDraft, InspectedModel
from rayloom_operator.objects.inspect_job import Commits


def facts_of_spec(known: InspectedModel | None, model: Model) -> InspectedModel | None:
    """Returns the stored facts if they are those of the spec's model and draft model; else None.

    If the spec has no draft model any more, the facts of the earlier draft model are left out.
    """
    if known is None or not _is_same(known, model):
        return None
    if model.draft is None:
        return known.model_copy(update={"draft": None})
    return known if known.draft is not None and _is_same(known.draft, model.draft) else None


def stored_commits(known: InspectedModel | None, model: Model) -> Commits:
    """Returns the commits that an inspection of `model` reads.

    The ranks of running engines have loaded the stored commits, so another inspection reads the same commits.
    """
    draft = model.draft
    was = None if known is None else known.draft
    return Commits(
        model=known.commit if known is not None and _is_same(known, model) else None,
        draft=was.commit if was is not None and draft is not None and _is_same(was, draft) else None,
    )


def inspected_model(model: Model, facts: ModelFacts) -> InspectedModel:
    """Returns the facts in the form in which the status stores them."""
    found = dict(facts)
    if facts.draft is not None and model.draft is not None:
        revision = model.draft.revision or ""
        found["draft"] = InspectedDraft(source=model.draft.source, revision=revision, **dict(facts.draft))
    return InspectedModel(source=model.source, revision=model.revision or "", **found)


def _is_same(known: InspectedModel | InspectedDraft, given: SourcedModel) -> bool:
    return (known.source, known.revision) == (given.source, given.revision or "")
