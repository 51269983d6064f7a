"""A model folder whose tokenizer has one token per byte: each id is a byte of a text, perhaps part of a character."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

START, END = 256, 257  # <|im_start|> and <|im_end|> (EOS)
VOCAB_SIZE = 258
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_model(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Writes tokenizer.json and tokenizer_config.json; ids 0 to 255 are the bytes, then the two special tokens."""
    alphabet = byte_alphabet()
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def byte_alphabet() -> list[str]:
    """GPT-2's character for each byte.

    A printable byte has its own character. The other bytes have the characters from U+0100 on, in order.
    """
    others = iter(range(0x100, 0x200))
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
