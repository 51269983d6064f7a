"""Rebuilds Hugging Face's tokenizer.json and tokenizer_config.json from a GGUF file.

Only byte-level BPE (GGUF's tokenizer model "gpt2") is supported. Before BPE, a rule splits the text. The file has
only the name of this rule (`tokenizer.ggml.pre`), so the rules are written out here.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from rayloom_engine.errors import ModelError, shown, word
from rayloom_engine.models.checkpoint.config_json import ConfigJson

_MODEL = "tokenizer.ggml.model"
_TOKENS = "tokenizer.ggml.tokens"
_MERGES = "tokenizer.ggml.merges"
# Token types of GGUF (ggml-org/ggml, docs/gguf.md).
_CONTROL = 3
_USER_DEFINED = 4

# How Llama 3 and Qwen2 split text. The two patterns differ in how many digits stay together.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2_SPLIT = rf"{_WORDS}|\p{{N}}|{_REST}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheme:
    """The tokenisation for a name in `tokenizer.ggml.pre`."""

    pre_tokenizer: pre_tokenizers.PreTokenizer
    ignore_merges: bool = False  # a word that is itself a token is not split further
    is_nfc: bool = False
    adds_bos: bool = False  # applies if the file has no tokenizer.ggml.add_bos_token


def write_tokenizer(fields: ConfigJson, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json into `folder`.

    `fields`: the GGUF file's fields. A tokenizer.json next to the GGUF file is used instead of these fields. Raises
    ModelError for a tokenizer that cannot be rebuilt.
    """
    beside = fields.path.parent / "tokenizer.json"
    if beside.is_file():
        shutil.copyfile(beside, folder / "tokenizer.json")
    else:
        _tokenizer(fields).save(str(folder / "tokenizer.json"))
    config_beside = fields.path.parent / "tokenizer_config.json"
    if beside.is_file() and config_beside.is_file():
        shutil.copyfile(config_beside, folder / "tokenizer_config.json")
        return
    text = json.dumps(_tokenizer_config(fields), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _tokenizer(fields: ConfigJson) -> Tokenizer:
    model = fields.get(_MODEL)
    scheme = _scheme(fields.text("tokenizer.ggml.pre", default="default")) if model == "gpt2" else None
    if scheme is None:
        raise ModelError(
            f"{fields.path}: tokenizer {shown(model)} with split {shown(fields.get('tokenizer.ggml.pre'))} cannot be "
            f"rebuilt; works: 'gpt2' with smollm, llama-bpe, qwen2, gpt-2, default. "
            f"Put the model's tokenizer.json beside the file"
        )
    tokens = fields.texts(_TOKENS)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        # The library raises a bare Exception for merges that do not match the vocabulary.
        bpe = models.BPE(vocab=vocabulary, merges=_merges(fields), fuse_unk=False, ignore_merges=scheme.ignore_merges)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{fields.path}: {_MERGES} do not go with {_TOKENS}: {word(str(error))}") from error
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = scheme.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if scheme.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    types = fields.get("tokenizer.ggml.token_type")
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types if isinstance(types, list) else [], strict=False)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    bos = _token(fields, "bos", tokens)
    if bos is not None and fields.get("tokenizer.ggml.add_bos_token", scheme.adds_bos):
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
                ),
            ]
        )
    return tokenizer


def _merges(fields: ConfigJson) -> list[tuple[str, str]]:
    merges = []
    for merge in fields.texts(_MERGES):
        first, _, second = merge.partition(" ")
        if not first or not second or " " in second:
            raise ModelError(
                f"{fields.path}: each of {_MERGES} must be two tokens with a blank between, given {shown(merge)}"
            )
        merges.append((first, second))
    return merges


def _token(fields: ConfigJson, role: str, tokens: list[str]) -> str | None:
    """Returns the token with the id in the field for `role`; None if the field has no usable id."""
    token_id = fields.get(f"tokenizer.ggml.{role}_token_id")
    is_id = isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < len(tokens)
    return tokens[token_id] if is_id else None


def _scheme(name: str) -> _Scheme | None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("default", "gpt-2"):
        return _Scheme(pre_tokenizer=byte_level)
    if name == "smollm":
        # Split into single digits first, then as GPT-2 does: "a  12" becomes a, two blanks, 1, 2.
        digits = pre_tokenizers.Digits(individual_digits=True)
        return _Scheme(pre_tokenizer=pre_tokenizers.Sequence([digits, byte_level]))
    if name == "llama-bpe":
        return _Scheme(pre_tokenizer=_split(_LLAMA3_SPLIT), ignore_merges=True, adds_bos=True)
    if name == "qwen2":
        return _Scheme(pre_tokenizer=_split(_QWEN2_SPLIT), is_nfc=True)
    return None


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), bytes_only])


def _tokenizer_config(fields: ConfigJson) -> dict[str, Any]:
    tokens = fields.texts(_TOKENS) if fields.get(_TOKENS) is not None else []
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields.count(f"{fields.get('general.architecture')}.context_length"),
    }
    for name, role in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"), ("unknown", "unk")):
        if (token := _token(fields, name, tokens)) is not None:
            config[f"{role}_token"] = token
    if template := fields.text("tokenizer.chat_template", default=""):
        config["chat_template"] = template
    return config
