"""POST /tokenize and /detokenize, in vLLM's formats."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rayloom_engine.errors import RequestError
from rayloom_engine.front.http.body import read_json
from rayloom_engine.front.openai.answer import check_model
from rayloom_engine.front.openai.parsing import parse_request
from rayloom_engine.front.openai.prompts import chat_prompt
from rayloom_engine.front.openai.wire import DetokenizeRequest, TokenizeRequest
from rayloom_engine.front.operations.service import Service
from rayloom_engine.sampling_params import check_token_ids


async def tokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    text = service.model_text()
    wire = parse_request(TokenizeRequest, await read_json(request, service.config.max_body_bytes))
    check_model(service, wire.model)
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
    service: Service = request.app.state.service
    text = service.model_text()
    wire = parse_request(DetokenizeRequest, await read_json(request, service.config.max_body_bytes))
    check_model(service, wire.model)
    check_token_ids(wire.tokens, text.model.vocab_size, "tokens")
    prompt = await asyncio.to_thread(text.tokenizer.decode, wire.tokens, skip_special_tokens=False)
    # JSONResponse's encoder would block the streams, as a million tokens can be 16 MB of text. msgspec is faster.
    return Response(msgspec.json.encode({"prompt": prompt}), media_type="application/json")
