"""POST /tokenize and /detokenize, and GET /tokenizer_info, in vLLM's formats."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rayloom_engine.errors import RequestError
from rayloom_engine.front.model_text import ModelText
from rayloom_engine.front.openai.fields.request_reading import read_request
from rayloom_engine.front.openai.fields.wire import DetokenizeRequest, TokenizeRequest
from rayloom_engine.front.openai.prompts import chat_prompt
from rayloom_engine.front.operations.service import Service
from rayloom_engine.sampling_params import check_token_ids


async def tokenize(request: Request) -> Response:
    _, text, wire = await read_request(request, TokenizeRequest)
    if (wire.prompt is None) == (wire.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if wire.messages is not None:
        ids = (await chat_prompt(text, wire.messages, wire)).ids
    else:
        assert wire.prompt is not None
        ids = await text.encode(wire.prompt, add_special_tokens=wire.add_special_tokens is not False)
    tokens = [text.tokenizer.token(token_id) for token_id in ids] if wire.return_token_strs else None
    return JSONResponse(
        {"tokens": ids, "count": len(ids), "max_model_len": text.model.max_model_len, "token_strs": tokens}
    )


async def detokenize(request: Request) -> Response:
    _, text, wire = await read_request(request, DetokenizeRequest)
    check_token_ids(wire.tokens, text.model.vocab_size, "tokens")
    prompt = await asyncio.to_thread(text.tokenizer.decode, wire.tokens, skip_special_tokens=False)
    # JSONResponse's encoder would block the streams: a million tokens can be 16 MB of text. msgspec is faster.
    return Response(msgspec.json.encode({"prompt": prompt}), media_type="application/json")


async def tokenizer_info(request: Request) -> Response:
    """Answers the model's tokenizer_config.json, with each special token as its text."""
    service: Service = request.app.state.service
    text = service.model_text()
    # These files may have integers of more than 64 bits, which msgspec cannot encode.
    return JSONResponse(await asyncio.to_thread(_info, text))


def _info(text: ModelText) -> dict[str, Any]:
    left_out = ("vocab_file", "merges_file")
    info = {name: _plain(value) for name, value in text.tokenizer.settings.items() if name not in left_out}
    info["tokenizer_class"] = str(info.get("tokenizer_class") or "PreTrainedTokenizerFast")
    # In some files this value is 1e30, for "no limit". The model's own limit is more useful.
    info["model_max_length"] = text.model.max_model_len
    if text.template is not None:
        info["chat_template"] = text.template.source
    return info


def _plain(value: Any) -> Any:
    """Returns `value`; each object in it that describes a token is replaced by the token's text."""
    if isinstance(value, dict):
        if isinstance(value.get("content"), str):
            return value["content"]
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
