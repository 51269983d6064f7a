"""ROUTES: every endpoint of the API port, with its handler, its request and answer models, and its statuses.

The router serves this table, and the OpenAPI document describes it. A new endpoint is one entry here.
"""

from __future__ import annotations

from rayloom_engine.front.anthropic.endpoint import count_tokens, messages
from rayloom_engine.front.anthropic.request import CountTokensRequest, MessagesRequest
from rayloom_engine.front.document.agent_answers import (
    AnthropicErrorAnswer,
    CountTokensAnswer,
    MessageAnswer,
    MessageEvent,
    ResponseAnswer,
    ResponseEvent,
)
from rayloom_engine.front.document.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    DetokenizeAnswer,
    HealthAnswer,
    LoadAnswer,
    ModelCard,
    ModelList,
    ServerInfo,
    TextCompletion,
    TextCompletionChunk,
    TokenizeAnswer,
    TokenizerInfo,
    VersionAnswer,
)
from rayloom_engine.front.document.api_route import ApiRoute
from rayloom_engine.front.document.statuses import OF_BODIES, OF_GENERATION, OF_MODEL_REQUESTS
from rayloom_engine.front.openai.adapters import load_adapter, unload_adapter
from rayloom_engine.front.openai.chat.endpoint import chat_completions
from rayloom_engine.front.openai.completions import completions
from rayloom_engine.front.openai.fields.wire import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from rayloom_engine.front.openai.models import get_model, list_models
from rayloom_engine.front.openai.tokens import detokenize, tokenize, tokenizer_info
from rayloom_engine.front.operations.health import engine_version, health, load, metrics, ready
from rayloom_engine.front.operations.server_info import FORMATS, server_info
from rayloom_engine.front.responses.endpoint import responses
from rayloom_engine.front.responses.request import ResponsesRequest

_HELLO = [{"role": "user", "content": "Hello"}]

ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        method="POST",
        path="/v1/chat/completions",
        handler=chat_completions,
        tag="Generation",
        summary="The answer to a conversation, whole or streamed",
        request=ChatRequest,
        answer=ChatCompletion,
        events=ChatCompletionChunk,
        statuses=OF_GENERATION,
        needs_key=True,
        is_generation=True,
        examples={
            "whole": {"messages": _HELLO, "max_tokens": 32},
            "streamed": {"messages": _HELLO, "stream": True, "stream_options": {"include_usage": True}},
        },
    ),
    ApiRoute(
        method="POST",
        path="/v1/completions",
        handler=completions,
        tag="Generation",
        summary="The text that follows a prompt, whole or streamed; also the log-probabilities of a prompt",
        request=CompletionRequest,
        answer=TextCompletion,
        events=TextCompletionChunk,
        statuses=OF_GENERATION,
        needs_key=True,
        is_generation=True,
        examples={
            "greedy": {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0},
            "score": {"prompt": "Once upon a time", "max_tokens": 0, "echo": True, "logprobs": 1},
        },
    ),
    ApiRoute(
        method="POST",
        path="/v1/responses",
        handler=responses,
        tag="Generation",
        summary="The answer to a conversation in OpenAI's Responses API, whole or streamed",
        request=ResponsesRequest,
        answer=ResponseAnswer,
        events=ResponseEvent,
        last_event="`response.completed`, `response.incomplete` or `error`",
        statuses=OF_GENERATION,
        needs_key=True,
        is_generation=True,
        examples={
            "whole": {"input": "Hello", "max_output_tokens": 32},
            "streamed": {"instructions": "Be brief.", "input": _HELLO, "stream": True, "max_output_tokens": 32},
        },
    ),
    ApiRoute(
        method="POST",
        path="/v1/messages",
        handler=messages,
        tag="Generation",
        summary="The answer to a conversation in Anthropic's Messages API, whole or streamed",
        request=MessagesRequest,
        answer=MessageAnswer,
        events=MessageEvent,
        last_event="`message_stop` or `error`",
        errors=AnthropicErrorAnswer,
        statuses=OF_GENERATION,
        needs_key=True,
        is_generation=True,
        examples={
            "whole": {"messages": _HELLO, "max_tokens": 32},
            "streamed": {"system": "Be brief.", "messages": _HELLO, "max_tokens": 32, "stream": True},
        },
    ),
    ApiRoute(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=count_tokens,
        tag="Tokens",
        summary="The number of prompt tokens of a request in Anthropic's Messages API",
        request=CountTokensRequest,
        answer=CountTokensAnswer,
        errors=AnthropicErrorAnswer,
        statuses=OF_MODEL_REQUESTS,
        needs_key=True,
        examples={"text": {"messages": _HELLO}},
    ),
    ApiRoute(
        method="GET",
        path="/v1/models",
        handler=list_models,
        tag="Models",
        summary="The served model, with `root` (a hub's id or a path) and `max_model_len`, and its LoRA adapters",
        answer=ModelList,
        needs_key=True,
    ),
    ApiRoute(
        method="GET",
        path="/v1/models/{model:path}",
        handler=get_model,
        tag="Models",
        summary="The same for a name; 404 for any name but those of the served model and its LoRA adapters",
        answer=ModelCard,
        statuses=frozenset((404,)),
        needs_key=True,
    ),
    ApiRoute(
        method="POST",
        path="/v1/load_lora_adapter",
        handler=load_adapter,
        tag="Models",
        summary="Loads a LoRA adapter; 403 unless `allow_runtime_lora_updating` is set",
        request=LoadAdapterRequest,
        text="text/plain",
        statuses=OF_BODIES | {403, 404},
        needs_key=True,
    ),
    ApiRoute(
        method="POST",
        path="/v1/unload_lora_adapter",
        handler=unload_adapter,
        tag="Models",
        summary="Unloads a LoRA adapter; requests that have it finish; 403 unless `allow_runtime_lora_updating` is set",
        request=UnloadAdapterRequest,
        text="text/plain",
        statuses=OF_BODIES | {403, 404},
        needs_key=True,
    ),
    ApiRoute(
        method="POST",
        path="/tokenize",
        handler=tokenize,
        tag="Tokens",
        summary="Text or messages to token ids",
        request=TokenizeRequest,
        answer=TokenizeAnswer,
        statuses=OF_MODEL_REQUESTS,
        needs_key=True,
        examples={"text": {"prompt": "Hello"}, "conversation": {"messages": _HELLO, "return_token_strs": True}},
    ),
    ApiRoute(
        method="POST",
        path="/detokenize",
        handler=detokenize,
        tag="Tokens",
        summary="Token ids to text",
        request=DetokenizeRequest,
        answer=DetokenizeAnswer,
        statuses=OF_MODEL_REQUESTS,
        needs_key=True,
        examples={"ids": {"tokens": [1, 2, 3]}},
    ),
    ApiRoute(
        method="GET",
        path="/tokenizer_info",
        handler=tokenizer_info,
        tag="Tokens",
        summary="The model's tokenizer_config.json and chat template",
        answer=TokenizerInfo,
        needs_key=True,
    ),
    ApiRoute(
        method="GET",
        path="/health",
        handler=health,
        tag="Operations",
        summary="200 once the model was loaded, also in recoveries and drains",
        answer=HealthAnswer,
    ),
    ApiRoute(
        method="GET",
        path="/ready",
        handler=ready,
        tag="Operations",
        summary="200 if new requests are accepted",
        answer=HealthAnswer,
    ),
    *(
        ApiRoute(
            method=method,
            path="/ping",
            handler=health,
            tag="Operations",
            summary="The same as /health, for SageMaker",
            answer=HealthAnswer,
        )
        for method in ("GET", "POST")
    ),
    ApiRoute(
        method="GET",
        path="/load",
        handler=load,
        tag="Operations",
        summary="The number of requests in flight",
        answer=LoadAnswer,
    ),
    ApiRoute(
        method="GET",
        path="/server_info",
        handler=server_info,
        tag="Operations",
        summary="Settings, environment and versions, without secrets",
        answer=ServerInfo,
        needs_key=True,
        parameters=(
            {
                "name": "config_format",
                "in": "query",
                "required": False,
                "schema": {"enum": list(FORMATS), "default": "text"},
                "description": "Form of `vllm_config`.",
            },
        ),
    ),
    ApiRoute(
        method="GET",
        path="/version",
        handler=engine_version,
        tag="Operations",
        summary="The engine's version",
        answer=VersionAnswer,
    ),
    ApiRoute(
        method="GET",
        path="/metrics",
        handler=metrics,
        tag="Operations",
        summary="Metrics in Prometheus' format",
        text="text/plain",
    ),
)
