"""The field `prompt_embeds` of a completion, which becomes prompts of embeddings."""

from __future__ import annotations

import asyncio
import base64
import binascii

from rayloom_engine.common.json_words import shown
from rayloom_engine.core.embeds import FIELD, NOT_ENABLED, EmbeddedPrompt, check_embeds
from rayloom_engine.errors import RequestError
from rayloom_engine.front.http.body import THREAD_ABOVE_BYTES
from rayloom_engine.front.openai.embeds.archive import BadTensor
from rayloom_engine.front.openai.embeds.saved_tensor import read_embeds
from rayloom_engine.front.openai.fields.wire import CompletionRequest
from rayloom_engine.front.operations.service import Service
from rayloom_engine.protocol.messages import ServedModel
from rayloom_engine.sampling_params import SamplingParams

_SLICE_CHARS = 1024 * 1024  # a multiple of 4; takes 1 to 3 ms
_NO_ENGINE = (
    f"{FIELD} is not enabled on the engines behind this gateway; leave it out, or start them with "
    "--enable-prompt-embeds, too"
)
_ECHO = f"echo with {FIELD} is not supported, because embeddings have no text; leave one of them out"
_LOGPROBS = (
    f"prompt_logprobs with {FIELD} is not supported, because the tokens of embeddings are not known; leave one of them "
    "out"
)
_BEAMS = f"use_beam_search with {FIELD} is not supported; leave one of them out"


def saved_tensors(wire: CompletionRequest, service: Service, model: ServedModel) -> list[str]:
    """Returns the base64 texts in the field, and clears the field: its megabytes are not needed any more.

    Raises RequestError if the server does not take embeddings, or if another field excludes them.
    """
    value = wire.prompt_embeds
    if value is None:
        return []
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise RequestError(
            f"{FIELD} must be a base64 string or a list of base64 strings, and not empty, given {shown(value)}", FIELD
        )
    if not service.config.enable_prompt_embeds:
        raise RequestError(NOT_ENABLED, FIELD)
    if not model.hidden_size:
        raise RequestError(_NO_ENGINE, FIELD)
    if wire.echo:
        raise RequestError(_ECHO, "echo")
    if wire.prompt_logprobs is not None:
        raise RequestError(_LOGPROBS, "prompt_logprobs")
    if wire.use_beam_search:
        raise RequestError(_BEAMS, "use_beam_search")
    wire.prompt_embeds = None
    return list(texts)


async def embedded_prompt(
    saved: str, wire: CompletionRequest, params: SamplingParams, model: ServedModel
) -> EmbeddedPrompt:
    """Returns the prompt in a base64 text. Raises RequestError. A large one is read in a thread."""
    if len(saved) <= THREAD_ABOVE_BYTES:
        prompt = _read(saved, model)
        await asyncio.sleep(0)  # lets other requests run: a request may have a thousand prompts
    else:
        prompt = await asyncio.to_thread(_read, saved, model)
    kept = wire.cut_prompt(range(len(prompt)), params, model.max_model_len)
    if len(kept) < len(prompt):
        prompt = EmbeddedPrompt(prompt.embeds.rows(kept[0], kept[-1] + 1))
    params.check_room(len(prompt), model.max_model_len)
    check_embeds(prompt.embeds, model.hidden_size)
    return prompt


def decoded(text: str) -> bytes:
    """Returns the bytes in a base64 text. Raises ValueError.

    Decodes slices: one call for the whole text would hold the interpreter's lock and stall all streams.
    """
    if 0 <= text.find("=") < len(text) - 2:
        raise ValueError("its padding is not at its end")
    places = range(0, len(text), _SLICE_CHARS)
    return b"".join(base64.b64decode(text[place : place + _SLICE_CHARS], validate=True) for place in places)


def _read(saved: str, model: ServedModel) -> EmbeddedPrompt:
    try:
        file = decoded(saved)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{FIELD} is not base64: {error}", FIELD) from error
    try:
        return EmbeddedPrompt(read_embeds(file, model.hidden_size))
    except BadTensor as error:
        raise RequestError(f"{FIELD} cannot be used: {error}", FIELD) from error
