"""The handlers of POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rayloom_engine.front.anthropic.answer import MessagesAnswer
from rayloom_engine.front.anthropic.request import CountTokensRequest, MessagesRequest
from rayloom_engine.front.anthropic.translation import translate, translate_prompt
from rayloom_engine.front.openai.answers.answer import answer, request_id_of
from rayloom_engine.front.openai.chat.call import prepare_chat
from rayloom_engine.front.openai.fields.request_reading import read_request


async def messages(request: Request) -> Response:
    service, text, wire = await read_request(request, MessagesRequest)
    translated = translate(wire)
    with translated.own_names():
        chat = translated.request()
        call = await prepare_chat(text, chat)
        request_id = request_id_of(request, chat)
        writer = MessagesAnswer(service, call.reader(f"msg_{request_id}", 0), wire.model, request_id)
        return await answer(request, service, call.text, writer, chat, [call.prompt_ids], call.params)


async def count_tokens(request: Request) -> Response:
    _, text, wire = await read_request(request, CountTokensRequest)
    translated = translate_prompt(wire)
    with translated.own_names():
        call = await prepare_chat(text, translated.request())
    return JSONResponse({"input_tokens": len(call.prompt_ids)})
