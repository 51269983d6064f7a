"""The handler of POST /v1/responses."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from rayloom_engine.front.openai.answers.answer import answer, request_id_of
from rayloom_engine.front.openai.chat.call import prepare_chat
from rayloom_engine.front.openai.fields.request_reading import read_request
from rayloom_engine.front.responses.answer import ResponsesAnswer
from rayloom_engine.front.responses.request import ResponsesRequest
from rayloom_engine.front.responses.translation import translate


async def responses(request: Request) -> Response:
    service, text, wire = await read_request(request, ResponsesRequest)
    translated = translate(wire)
    with translated.own_names():
        chat = translated.request()
        call = await prepare_chat(text, chat)
        writer = ResponsesAnswer(service, call, wire, request_id_of(request, chat))
        return await answer(request, service, call.text, writer, chat, [call.prompt_ids], call.params)
