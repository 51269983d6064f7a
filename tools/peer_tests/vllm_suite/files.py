"""The files of vLLM's tests that apply to any server of its API, and the tests among them that cannot pass here."""

from __future__ import annotations

FILES = (
    "entrypoints/openai/completion/test_completion.py",
    "entrypoints/openai/completion/test_prompt_validation.py",
    "entrypoints/openai/completion/test_token_in_token_out.py",
    "entrypoints/openai/chat_completion/test_chat.py",
    "entrypoints/openai/chat_completion/test_chat_completion.py",
    "entrypoints/openai/chat_completion/test_chat_echo.py",
    "entrypoints/openai/chat_completion/test_chat_logit_bias_validation.py",
    "entrypoints/openai/chat_completion/test_completion_with_function_calling.py",
    "entrypoints/openai/chat_completion/test_enable_force_include_usage.py",
    "entrypoints/openai/chat_completion/test_extra_content_fields.py",
    "entrypoints/openai/chat_completion/test_include_reasoning.py",
    "entrypoints/openai/chat_completion/test_logprob_token_ids.py",
    "entrypoints/openai/chat_completion/test_root_path.py",
    "entrypoints/openai/chat_completion/test_thinking_token_budget.py",
    "entrypoints/openai/models/test_models.py",
    "entrypoints/openai/test_chunked_prompt.py",
    "entrypoints/openai/test_return_token_ids.py",
    "entrypoints/openai/test_return_tokens_as_ids.py",
    # The other test files of this folder run code inside vLLM, without a server.
    "entrypoints/openai/responses/test_basic.py",
    "entrypoints/openai/responses/test_function_call.py",
    "entrypoints/openai/responses/test_namespace_tool_separator.py",
    "entrypoints/openai/responses/test_simple.py",
    "entrypoints/openai/responses/test_stateful.py",
    "entrypoints/openai/responses/test_structured_output.py",
    "entrypoints/anthropic/test_messages.py",
    "entrypoints/serve/instrumentator/test_basic.py",
    "entrypoints/serve/instrumentator/test_metrics.py",
    "entrypoints/serve/tokenize/test_tokenization.py",
    "entrypoints/tool_parsers/test_hermes_tool_parser.py",
    "tool_use/test_chat_completions.py",
    "tool_use/test_parallel_tool_calls.py",
    "tool_use/test_tool_calls.py",
)

# A part of a test's id -> the reason why its result says nothing about a server.
NOT_APPLICABLE = {
    "stateful": "stored responses: this server keeps no state",
    "_lora": "adapters",
    "-lora": "adapters",
}

_NO_REASONING = (
    "SmolLM2 writes no reasoning tags. vLLM's parser `qwen3` takes all text without an end tag for reasoning; here it "
    "is content, unless the prompt opens the reasoning"
)
# A part of a test's id -> the cause of a failure that vLLM does not have.
_INCOMPLETE = (
    "an answer that reaches 512 tokens ends with `response.incomplete`, as in OpenAI's API; vLLM always sends "
    "`response.completed`"
)
EXCEPTIONS = {
    "test_messages.py::test_anthropic_streaming_cache_usage": (
        "wants no cached token of a first prompt. Here a prefix is found from 16 tokens on, so SmolLM2's system "
        "message, which earlier tests computed, is cached; on a CPU vLLM finds prefixes of 128"
    ),
    "test_prompt_validation.py::test_empty_prompt": (
        "wants vLLM's words for an empty `prompt_embeds`; our 400 names the field"
    ),
    "test_chat.py::test_long_seed": "wants a type of Pydantic's errors; the 400 says what is allowed",
    "test_chat.py::test_invocations": "`/invocations` is the path of SageMaker's containers; OpenAI's API has none",
    "test_chat.py::test_response_format_json_schema": (
        "wants the same sampled answer twice, which is chance: of 100 requests, 49 have this answer here and 46 on vLLM"
    ),
    "test_basic.py::test_show_version": "wants the version of the installed vLLM",
    "test_chat_echo.py::test_top_logprobs": 'sends `logprobs` as the text "true"; OpenAI\'s API takes only a boolean',
    "test_include_reasoning.py::test_default_includes_reasoning": _NO_REASONING,
    "test_include_reasoning.py::test_reasoning_tokens_in_usage": _NO_REASONING,
    "test_simple.py::test_streaming_reasoning_tokens_e2e": _NO_REASONING,
    "test_simple.py::test_non_streaming_reasoning_tokens_e2e": _NO_REASONING,
    "test_function_call.py::test_function_tool_use[required": _NO_REASONING,
    "test_function_call.py::test_function_calling_with_streaming_types[True-auto": _INCOMPLETE,
    "test_function_call.py::test_function_calling_with_streaming_types[False-auto": _INCOMPLETE,
    "test_tokenization.py::test_tokenize_chat_with_tools": "SmolLM2's template ignores tools, so this server writes "
    "them into the system message; vLLM leaves them out",
}
