"""The words that the simulated engine and the plain server stream, and a tokenizer whose tokens are these words."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

_TEXT = "the quick brown fox jumps over a lazy dog and then it rests near some old stone wall"
WORDS = tuple(_TEXT.split(" "))
FIRST_WORD_ID = 256  # id of the first word; the ids before it are the bytes
END = FIRST_WORD_ID + len(WORDS)
VOCAB_SIZE = END + 1
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def write_tokenizer(folder: Path) -> None:
    """Writes a chat template and a byte-level tokenizer. Each word is one token, together with the blank before it."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"\u0120{word}" for word in WORDS)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: rank for rank, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
