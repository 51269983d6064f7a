"""A GGUF file's tokenizer as Hugging Face's tokenizer.json and tokenizer_config.json.

Only byte-level BPE (GGUF's tokenizer model "gpt2") is rebuilt. The way text is split before BPE is not in the file,
only its name is (`tokenizer.ggml.pre`), so each name needs its own rule here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from rayloom_engine.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF (ggml-org/ggml, docs/gguf.md)

# The splits of Llama 3 and Qwen2: they differ in how many digits stay together.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2_SPLIT = rf"{_WORDS}|\p{{N}}|{_REST}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheme:
    """What a `tokenizer.ggml.pre` name stands for."""

    pre_tokenizer: pre_tokenizers.PreTokenizer
    ignore_merges: bool = False  # a word that is a token as a whole is taken as it is
    is_nfc: bool = False
    adds_bos: bool = False  # where the file does not say


def write_tokenizer(fields: Mapping[str, Any], source: Path, folder: Path) -> None:
    """Writes the tokenizer's two files into `folder`.

    `fields` are the GGUF file's. A tokenizer.json beside the GGUF file wins. Raises ModelError for a kind of
    tokenizer that cannot be rebuilt.
    """
    beside = source.parent / "tokenizer.json"
    if beside.is_file():
        shutil.copyfile(beside, folder / "tokenizer.json")
    else:
        _tokenizer(fields, source).save(str(folder / "tokenizer.json"))
    config_beside = source.parent / "tokenizer_config.json"
    if beside.is_file() and config_beside.is_file():
        shutil.copyfile(config_beside, folder / "tokenizer_config.json")
        return
    text = json.dumps(_tokenizer_config(fields), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _tokenizer(fields: Mapping[str, Any], source: Path) -> Tokenizer:
    model = fields.get("tokenizer.ggml.model")
    scheme = _scheme(str(fields.get("tokenizer.ggml.pre", "default"))) if model == "gpt2" else None
    if scheme is None:
        raise ModelError(
            f"{source}: tokenizer {model!r} with split {fields.get('tokenizer.ggml.pre')!r} cannot be rebuilt; "
            f"works: 'gpt2' with smollm, llama-bpe, qwen2, gpt-2, default. "
            f"Put the model's tokenizer.json beside the file"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=scheme.ignore_merges)
    )
    tokenizer.pre_tokenizer = scheme.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if scheme.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    types = fields.get("tokenizer.ggml.token_type", [])
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    bos_id = fields.get("tokenizer.ggml.bos_token_id")
    if bos_id is not None and fields.get("tokenizer.ggml.add_bos_token", scheme.adds_bos):
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
                ),
            ]
        )
    return tokenizer


def _scheme(name: str) -> _Scheme | None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("default", "gpt-2"):
        return _Scheme(pre_tokenizer=byte_level)
    if name == "smollm":
        # Every digit alone first, and only then GPT-2's split: "a  12" is a, two blanks, 1, 2.
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


def _tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    tokens: list[str] = fields.get("tokenizer.ggml.tokens", [])
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields[f"{fields['general.architecture']}.context_length"],
    }
    for name, role in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"), ("unknown", "unk")):
        token_id = fields.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and token_id < len(tokens):
            config[f"{role}_token"] = tokens[token_id]
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
