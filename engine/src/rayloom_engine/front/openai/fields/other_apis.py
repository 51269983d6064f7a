"""The fields of other APIs that this server knows but does not implement, as two tables.

A field in `WITHOUT_EFFECT` cannot change the answer here, so any value is accepted. A field in `NOT_IMPLEMENTED` would
change the answer, so only values without an effect (`neutral`) are accepted. A field that is missing in both tables and
in the endpoint's model is refused as unknown. docs/api.md has the same tables, written by tools/write_api_docs.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutEffect:
    """A field that is accepted with any value."""

    name: str
    origin: str  # the API that has this field
    reason: str  # why the field changes nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class NotImplementedField:
    """A field that is refused. Only null and the values in `neutral` are accepted, because they have no effect."""

    name: str
    origin: str
    meaning: str
    neutral: tuple[object, ...] = ()
    instead: str = ""  # the field to use instead, if this server has the feature under another name


def _without(origin: str, **reasons: str) -> list[WithoutEffect]:
    return [WithoutEffect(name=name, origin=origin, reason=reason) for name, reason in reasons.items()]


_OF_ANOTHER = "a setting of `{}`, a feature that this server refuses"

WITHOUT_EFFECT: Mapping[str, WithoutEffect] = MappingProxyType(
    {
        field.name: field
        for field in (
            *_without(
                "OpenAI",
                user="names the end user; this server keeps no account of users",
                metadata="labels of a stored answer; answers are not stored",
                store="asks to keep the answer; answers are not stored",
                service_tier="chooses a price; all requests are treated alike",
                verbosity="asks for a longer or shorter answer; the model alone decides, and `max_tokens` limits it",
                safety_identifier="names the end user; this server keeps no account of users",
                prompt_cache_key="chooses the server that has the prefix; equal prefixes are reused without it",
                prompt_cache_retention="time for which a cached prefix is kept; here memory alone limits that time",
                prompt_cache_options="settings of the prefix cache; it is always on",
            ),
            *_without(
                "vLLM",
                guided_decoding_backend="chooses a library for grammars; this server has one",
            ),
            *_without(
                "SGLang",
                data_parallel_rank="chooses a replica; an engine has only one",
                log_metrics="whether the metrics count this request; they count every request",
            ),
            *_without(
                "llama.cpp",
                cache_prompt="keeps a prefix; equal prefixes are always shared",
                id_slot="chooses a slot; the scheduler assigns slots",
                timings_per_token="asks for times; they are in the metrics",
                return_progress="asks for progress of the prompt; until the first token a stream has only comments",
                n_keep="tokens kept when the context overflows; here a prompt that does not fit is refused",
                n_discard="tokens dropped when the context overflows; here a prompt that does not fit is refused",
                repeat_last_n=_OF_ANOTHER.format("repeat_penalty"),
                mirostat_tau=_OF_ANOTHER.format("mirostat"),
                mirostat_eta=_OF_ANOTHER.format("mirostat"),
                dry_base=_OF_ANOTHER.format("dry_multiplier"),
                dry_allowed_length=_OF_ANOTHER.format("dry_multiplier"),
                dry_penalty_last_n=_OF_ANOTHER.format("dry_multiplier"),
                dry_sequence_breakers=_OF_ANOTHER.format("dry_multiplier"),
                xtc_threshold=_OF_ANOTHER.format("xtc_probability"),
                dynatemp_exponent=_OF_ANOTHER.format("dynatemp_range"),
            ),
            *_without(
                "Anthropic",
                cache_control="asks to cache a prefix; equal prefixes are always shared",
                context_management="asks to drop old parts of the conversation; it is used as sent",
                diagnostics="asks why a prefix was not cached; `usage` has the numbers",
                inference_geo="chooses a region; an engine has only one",
                speed="chooses a price; all requests are treated alike",
                user_profile_id="names the end user; this server keeps no account of users",
            ),
            *_without(
                "Ollama, LM Studio",
                keep_alive="time for which the model stays loaded; here it always stays loaded",
                ttl="time for which the model stays loaded; here it always stays loaded",
                num_ctx="size of the context; the server has one, and a prompt that does not fit is refused",
            ),
            *_without(
                "Open WebUI",
                chat_id="names the conversation; requests are independent",
                session_id="names the session; requests are independent",
            ),
        )
    }
)


def _refused(origin: str, name: str, meaning: str, *neutral: object, instead: str = "") -> NotImplementedField:
    return NotImplementedField(name=name, origin=origin, meaning=meaning, neutral=neutral, instead=instead)


_CONSTRAINT = "the answer follows a grammar"

NOT_IMPLEMENTED: Mapping[str, NotImplementedField] = MappingProxyType(
    {
        field.name: field
        for field in (
            _refused("OpenAI", "background", "an answer that is fetched later", False, instead="a stream"),
            _refused("OpenAI", "previous_response_id", "a stored answer", instead="the earlier items in `input`"),
            _refused("OpenAI", "conversation", "a stored conversation", instead="the earlier items in `input`"),
            _refused("OpenAI", "audio", "speech in the answer"),
            _refused("OpenAI", "modalities", "speech in the answer", ["text"]),
            _refused("OpenAI", "prediction", "a predicted answer"),
            _refused("OpenAI", "web_search_options", "a search before the answer"),
            _refused("OpenAI", "moderation", "a judgement of prompt and answer"),
            _refused("OpenAI", "suffix", "the text after the gap to fill", ""),
            _refused("Anthropic", "container", "tools that run in the server"),
            _refused("Anthropic", "mcp_servers", "tools that run in the server", []),
            _refused("vLLM", "guided_whitespace_pattern", "the blanks in JSON"),
            _refused("vLLM", "early_stopping", "a setting of beam search", False),
            _refused("vLLM", "logits_processors", "code that changes the logits", []),
            _refused("vLLM", "chat_template", "another chat template"),
            _refused("vLLM", "media_io_kwargs", "settings of images, audio and video", {}),
            _refused("vLLM", "mm_processor_kwargs", "settings of images, audio and video", {}),
            _refused("vLLM", "vllm_xargs", "arguments of plugins", {}),
            _refused("vLLM", "repetition_detection", "an end of the answer when its text repeats"),
            _refused("vLLM", "spaces_between_special_tokens", "blanks between special tokens", True),
            _refused("SGLang", "structural_tag", _CONSTRAINT),
            _refused("SGLang", "stop_regex", "an expression that ends the answer", "", [], instead="stop"),
            _refused("SGLang", "no_stop_trim", "the stop string stays", False, instead="include_stop_str_in_output"),
            _refused("SGLang", "min_new_tokens", "a least length", 0, instead="min_tokens"),
            _refused("SGLang", "lora_path", "an adapter", instead="model"),
            _refused("SGLang", "separate_reasoning", "thoughts in a field of their own", False),
            _refused("SGLang", "stream_reasoning", "thoughts in a field of their own", False),
            _refused("SGLang", "custom_logit_processor", "code that changes the logits"),
            _refused("SGLang", "custom_params", "arguments of `custom_logit_processor`"),
            _refused("SGLang", "return_hidden_states", "the model's hidden states", False),
            _refused("SGLang", "session_params", "a session"),
            _refused("SGLang", "rid", "the request's id", instead="request_id"),
            _refused("llama.cpp", "n_predict", "a greatest length", instead="max_tokens"),
            _refused("llama.cpp", "repeat_penalty", "a penalty on repeated tokens", 1, instead="repetition_penalty"),
            _refused("llama.cpp", "penalize_nl", "a penalty on line ends", False),
            _refused("llama.cpp", "typical_p", "a sampler", 1),
            _refused("llama.cpp", "tfs_z", "a sampler", 1),
            _refused("llama.cpp", "top_n_sigma", "a sampler", -1),
            _refused("llama.cpp", "mirostat", "a sampler", 0),
            _refused("llama.cpp", "dry_multiplier", "a sampler", 0),
            _refused("llama.cpp", "xtc_probability", "a sampler", 0),
            _refused("llama.cpp", "dynatemp_range", "a sampler", 0),
            _refused("llama.cpp", "min_keep", "number of tokens that samplers keep at least", 0),
            _refused("llama.cpp", "samplers", "the order of samplers"),
            _refused("llama.cpp", "n_probs", "log-probabilities", 0, instead="logprobs"),
            _refused("llama.cpp", "post_sampling_probs", "another kind of log-probabilities", False),
            _refused("llama.cpp", "n_indent", "a least indentation", 0),
            _refused("llama.cpp", "t_max_predict_ms", "an end of the answer after some time", 0, -1),
            _refused("llama.cpp", "reasoning_format", "thoughts in a field of their own", "none"),
            _refused("llama.cpp", "lora", "adapters", [], instead="model"),
            _refused("TGI", "max_new_tokens", "a greatest length", instead="max_tokens"),
            _refused("TGI", "do_sample", "greedy decoding", True, instead="temperature"),
            _refused("TGI", "top_n_tokens", "log-probabilities", 0, instead="logprobs"),
            _refused("TGI", "return_full_text", "the prompt in the answer", False, instead="echo"),
            _refused("TGI", "decoder_input_details", "the prompt's tokens", False, instead="prompt_logprobs"),
            _refused("TGI", "details", "tokens of the answer", False, instead="logprobs"),
            _refused("TGI", "truncate", "a prompt that is cut to a length", instead="truncate_prompt_tokens"),
            _refused("TGI", "watermark", "a watermark in the text", False),
            _refused("TGI", "adapter_id", "an adapter", instead="model"),
            _refused("Ollama", "options", "settings in an object", {}, instead="the fields of this API"),
            _refused("Ollama", "num_predict", "a greatest length", instead="max_tokens"),
            _refused("Ollama", "think", "the model's thoughts, on or off", instead="chat_template_kwargs"),
            _refused("Ollama", "system", "a system prompt", "", instead="messages"),
            _refused("Ollama", "template", "another chat template", ""),
            _refused("Ollama", "images", "images in the prompt", []),
            _refused("OpenRouter", "reasoning", "the length of the model's thoughts", instead="chat_template_kwargs"),
            _refused("OpenRouter", "transforms", "a prompt that is cut to a length", []),
            _refused("OpenRouter", "models", "other models to try", []),
            _refused("Anthropic", "thinking", "the model's thoughts, on or off", instead="chat_template_kwargs"),
            _refused("Mistral", "random_seed", "the seed", instead="seed"),
            _refused("Mistral", "safe_prompt", "a system prompt of the server's", False),
        )
    }
)
