"""The handlers of POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rayloom_engine.front.anthropic.answer import MessagesAnswer
from rayloom_engine.front.anthropic.request import CountTokensRequest, MessagesRequest
from rayloom_engine.front.anthropic.translation import translate, translate_prompt
from rayloom_engine.front.http.body import read_json
from rayloom_engine.front.openai.answer import answer, check_model, request_id_of
from rayloom_engine.front.openai.chat_call import prepare_chat
from rayloom_engine.front.openai.parsing import parse_request
from rayloom_engine.front.operations.service import Service


async def messages(request: Request) -> Response:
    service: Service = request.app.state.service
    text = service.model_text()
    wire = parse_request(MessagesRequest, await read_json(request, service.config.max_body_bytes))
    check_model(service, wire.model)
    translated = translate(wire)
    with translated.own_names():
        chat = translated.request()
        call = await prepare_chat(text, chat)
        request_id = request_id_of(request, chat)
        writer = MessagesAnswer(service, call.reader(f"msg_{request_id}", 0), request_id)
        return await answer(request, service, call.text, writer, chat, [call.prompt_ids], call.params)


async def count_tokens(request: Request) -> Response:
    service: Service = request.app.state.service
    text = service.model_text()
    wire = parse_request(CountTokensRequest, await read_json(request, service.config.max_body_bytes))
    check_model(service, wire.model)
    translated = translate_prompt(wire)
    with translated.own_names():
        call = await prepare_chat(text, translated.request())
    return JSONResponse({"input_tokens": len(call.prompt_ids)})
