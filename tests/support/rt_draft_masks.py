"""Steps of slots that have a grammar and a draft, and the grammars of the core."""

from __future__ import annotations

import numpy as np

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import NewSlot, SlotStep
from rayloom_engine.grammar.compile import grammar_of
from rayloom_engine.grammar.matcher import Mask
from rayloom_engine.structured_outputs import StructuredOutputs
from rayloom_engine.worker.draft_forms import DraftForm, DraftForms
from rayloom_engine.worker.forms import Forms
from rayloom_engine.worker.masks import Masks, StepMasks
from rayloom_engine.worker.slots import Slot
from rt_forms import EOS, ids_of, tiny_vocabulary
from rt_tiny import VOCAB_SIZE

PROMPT = (5, 6)
# After "b" this grammar needs more items than the parser may have.
TOO_COMPLEX = "\n".join(
    (
        'start: "a" "c" | "b" (x | y)',
        *(f"{rule}: " + " | ".join(f'"{rule}{n}"' for n in range(1500)) for rule in "xy"),
    )
)


def texts_of(mask: Mask | None) -> str | None:
    """The allowed tokens in the order of their ids; an end token is "$"."""
    if mask is None:
        return None
    ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return "".join("$" if number == EOS else tiny_vocabulary().token_bytes(int(number)).decode() for number in ids)


def form_params(form: dict[str, object], **other: object) -> DecodingParams:
    after = str(form.get("after", ""))
    grammar = grammar_of(StructuredOutputs(**form)) if form else ""
    return DecodingParams(max_tokens=50, grammar=grammar, grammar_after=after, **other)


def draft_step(
    forms: Forms, number: int, params: DecodingParams, draft: str | tuple[int, ...], generated: str = ""
) -> tuple[SlotStep, Slot]:
    """A step of a slot with a draft."""
    new = NewSlot(
        slot=number,
        request_id=f"{number}",
        token_ids=(*PROMPT, *ids_of(generated)),
        num_prompt_tokens=len(PROMPT),
        block_table=(0,),
        params=params,
        eos_token_ids=(EOS,),
    )
    slot = Slot(new, forms=forms)
    while slot.form is not None and not slot.form.is_built:
        slot.form.wait_a_slice()
    while not forms.is_built:
        forms.wait_a_slice()
    ids = tuple(ids_of(draft)) if isinstance(draft, str) else draft
    slot.write_draft(ids)
    start = slot.num_tokens - 1
    return SlotStep(slot=number, start=start, num_tokens=1 + len(ids), draft_token_ids=ids, samples=True), slot


def set_masks(forms: Forms, *pairs: tuple[SlotStep, Slot]) -> StepMasks:
    return Masks(forms, VOCAB_SIZE).set(pairs, is_whole_step=True)


def core_grammar(forms: DraftForms, params: DecodingParams) -> DraftForm:
    """The core's grammar of a sequence, after it was built."""
    grammar = forms.begin(params, len(PROMPT))
    while not grammar._form.is_built:
        grammar._form.wait_a_slice()
    return grammar


def fitted(forms: DraftForms, form: dict[str, object], generated: str, draft: str, num: int = 9) -> str:
    grammar = core_grammar(forms, form_params(form))
    forms.begin_step()
    ids = grammar.fit([*PROMPT, *ids_of(generated)], tuple(ids_of(draft)), num)
    return "".join(tiny_vocabulary().token_bytes(token_id).decode() for token_id in ids)
