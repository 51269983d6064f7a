"""The tests of llama.cpp's server that cannot apply or cannot pass here, with reasons."""

from __future__ import annotations

# A part of a test's id -> the reason why its result says nothing about a server.
NOT_APPLICABLE = {
    "test_no_ui": "llama.cpp's own page at /",
    "test_server_model_aliases_and_tags": "llama.cpp's own fields of the list of models",
}

_FIRST_EVENT = 'wants no `content` in the first event of a stream; in OpenAI\'s API it is ""'
_CONTEXT = "wants a type and fields of llama.cpp's errors; here the code is OpenAI's, `context_length_exceeded`"
_PREFILL = (
    "an assistant message at the end is always continued by llama.cpp; by OpenAI's API it is not, here if "
    "`continue_final_message` asks for it"
)
_SLOTS = "llama.cpp's own API: /completion and /slots"
_IMAGE = "wants the status 500 for an image; the 400 here names the block"
_WRONG_KEY = (
    "wants the type `authentication_error`; in OpenAI's API it is `invalid_request_error` with the code "
    "`invalid_api_key`"
)
_OWN_ANSWER = "wants `content`, which answers of llama.cpp's own API have at /completions"
_ANY_ORIGIN = "llama.cpp answers browsers of every origin; here `--cors-allowed-origins` names them, by default none"
_LOCAL_ORIGINS = "`localhost` for all ports of this machine is a value of llama.cpp's; here every origin is named"
# A part of a test's id -> the cause of a failure that llama.cpp does not have. A test that uses a path of llama.cpp's
# own API is skipped, with the path as the cause.
EXCEPTIONS = {
    "test_server_multiple_addresses": "gives several addresses in --host, a setting of llama.cpp",
    "test_chat_completion_with_timings_per_token": "wants `timings`, a field of llama.cpp",
    "test_chat_template_assistant_prefill[Whill-Whill]": _PREFILL,
    "test_chat_template_assistant_prefill[prefill1-Wh": _PREFILL,
    "test_context_size_exceeded": _CONTEXT,
    "test_context_size_exceeded_stream": _CONTEXT,
    "test_invalid_chat_completion_req[messages7]": "two assistant messages at the end are refused by llama.cpp, which "
    "would continue the last; OpenAI's API takes them",
    "test_logprobs_stream": _FIRST_EVENT,
    "test_return_progress[64-2-True]": "wants `prompt_progress`, a field of llama.cpp",
    "test_verbose_debug": "sends `verbose` and wants `__verbose`, fields of llama.cpp",
    "test_anthropic_empty_messages": "Anthropic's API refuses a request without messages",
    "test_anthropic_thinking": "a budget of 50 tokens of thinking; Anthropic's API refuses less than 1,024",
    "test_anthropic_tool_result_with_image": _IMAGE,
    "test_anthropic_vision_format_accepted": _IMAGE,
    "test_responses_stream_with_llama_telemetry": "wants `timings` and `prompt_progress`, fields of llama.cpp",
    "test_completion_parallel_slots[1-3]": _SLOTS,
    "test_completion_parallel_slots[2-2]": _SLOTS,
    "test_completion_parallel_slots[2-4]": _SLOTS,
    "test_completion_parallel_slots[4-2]": _SLOTS,
    "test_completion_parallel_slots[4-6]": _SLOTS,
    "test_incorrect_api_key[None]": _WRONG_KEY,
    "test_incorrect_api_key[invalid-key]": _WRONG_KEY,
    "::test_correct_api_key": _OWN_ANSWER,
    "::test_correct_api_key_anthropic_header": _OWN_ANSWER,
    "test_cors_options[localhost-Access-Control-Allow-Origin": _ANY_ORIGIN,
    "test_cors_options[origin-Access-Control-Allow-Credentials": _ANY_ORIGIN,
    "test_cors_options[web.mydomain.fr-Access-Control-Allow-Headers": _ANY_ORIGIN,
    "test_cors_options[web.mydomain.fr-Access-Control-Allow-Methods": _ANY_ORIGIN,
    "test_cors_options[web.mydomain.fr-Access-Control-Allow-Origin": _ANY_ORIGIN,
    "test_cors_origins_defaults_to_localhost_with_tools_enabled": _LOCAL_ORIGINS,
    "test_cors_origins_localhost_reflects": _LOCAL_ORIGINS,
    "test_cors_origins_localhost_rejects": _LOCAL_ORIGINS,
    "test_completion_without_tool_call_fast[meta-llama-Llama-3.3-70B-Instruct-128-tools0-None": _FIRST_EVENT,
    "test_completion_without_tool_call_fast[meta-llama-Llama-3.3-70B-Instruct-128-tools1-None": _FIRST_EVENT,
    "test_completion_without_tool_call_fast[meta-llama-Llama-3.3-70B-Instruct-128-tools2-none": _FIRST_EVENT,
}
