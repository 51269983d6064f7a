"""Tokenizer: turns text into token ids and back.

Uses only the `tokenizers` library: transformers takes seconds to import.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.decoders

from rayloom_engine.errors import ModelError, RequestError, shown, word

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DECODED_ALONE = 1024  # with more tokens than this, decoding releases the interpreter lock
REPLACEMENT = "\ufffd"  # the character U+FFFD, which a decoder writes for bytes that are not (yet) UTF-8


class Tokenizer:
    """A model's tokenizer. Safe for use from several threads; encoding releases the interpreter lock."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
        """`settings`: the content of tokenizer_config.json. Raises ModelError if a special token is not a text."""
        # The file may contain the truncation and padding of a training run, but a server needs every token.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.settings = settings
        self.special_tokens = {name: _token_text(name, settings[name]) for name in SPECIAL_NAMES if settings.get(name)}
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = len(vocabulary)
        self.max_token_chars = max(map(len, vocabulary), default=1)  # characters in the longest token
        self.is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._bos_id = self._missing_bos_id()

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Returns the tokenizer in a model folder. Raises ModelError if tokenizer.json is missing or broken."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json; put the model's tokenizer.json there")
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
            backend.no_truncation()
            backend.no_padding()
            # If parts of the file contradict each other, the library panics when it encodes the first text. So a text
            # is encoded here.
            backend.encode_batch(["a"], add_special_tokens=True)
        except BaseException as error:  # the library raises Exception, or PanicException, a BaseException
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ModelError(f"{path} cannot be used: {word(str(error))}") from error
        return cls(backend, read_settings(folder))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`.

        `add_special_tokens` also adds the tokens that the model expects around a plain text (often a BOS).
        """
        try:
            # The text is encoded as a batch of one, because the library's `encode` holds the interpreter lock.
            ids: list[int] = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise RequestError("the text has half of a surrogate pair, which is not a character; remove it") from error
        if add_special_tokens and self._bos_id is not None:
            ids.insert(0, self._bos_id)
        return ids

    def document_start(self) -> list[int]:
        """Returns a list with the token that starts a document; an empty list if the vocabulary has no such token."""
        names = ("<|endoftext|>", self.special_tokens.get("bos_token"), self.special_tokens.get("eos_token"))
        ids = (self.backend.token_to_id(name) for name in names if name is not None)
        return next(([token_id] for token_id in ids if token_id is not None), [])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`. Bytes that are not UTF-8 become U+FFFD. Ids outside the vocabulary are skipped."""
        # Many tokens are decoded as a batch of one text, because the library's `decode` holds the interpreter lock. For
        # a few tokens, a batch would be slower.
        if len(ids) > DECODED_ALONE:
            return str(self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0])
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def token(self, token_id: int) -> str | None:
        """Returns the vocabulary's own spelling of an id, such as "Ġthe"; None for an id outside the vocabulary."""
        token: str | None = self.backend.id_to_token(token_id)
        return token

    def token_text(self, token_id: int) -> str:
        """Returns the text of a single token, special or not. Half a character becomes U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - one tokenizer lives as long as its process
    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text."""
        token = self.token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            return byte_level_bytes(token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        if token.startswith("\u2581"):  # SentencePiece's blank: decoding strips it at the start of a text
            return (" " + self.decode([token_id], skip_special_tokens=False).removeprefix(" ")).encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - as above
    def whole_text(self, token_id: int) -> str | None:
        """Returns the text of a token whose bytes are whole characters; None for all other tokens."""
        try:
            return self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return None

    def _missing_bos_id(self) -> int | None:
        # Older Llama folders set add_bos_token, but their tokenizer.json does not add a BOS.
        bos = self.special_tokens.get("bos_token")
        if self.settings.get("add_bos_token") is not True or bos is None:
            return None
        bos_id: int | None = self.backend.token_to_id(bos)
        return None if bos_id in self.backend.encode("", add_special_tokens=True).ids else bos_id


def read_settings(folder: Path) -> dict[str, Any]:
    """Returns the content of a folder's tokenizer_config.json; empty if the file is missing.

    Raises ModelError if the file is broken.
    """
    path = folder / "tokenizer_config.json"
    try:
        if not path.exists():
            return {}
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or not JSON
        raise ModelError(f"{path} is not JSON that can be read: {error}") from error
    if not isinstance(settings, dict):
        raise ModelError(f"{path} must hold an object, it holds {type(settings).__name__}")
    return settings


def byte_level_bytes(token: str) -> bytes:
    """Returns the bytes of a byte-level token.

    A token with characters outside the byte alphabet was added to the vocabulary, and is its own text.
    """
    try:
        return bytes(_CHAR_TO_BYTE[char] for char in token)
    except KeyError:
        return token.encode("utf-8", "replace")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes stand for themselves, the other 68 are U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_CHAR_TO_BYTE = _byte_alphabet()


def _token_text(name: str, token: object) -> str:
    # A token in the settings is a string, or an object with the string as `content`.
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ModelError(
            f"tokenizer_config.json: {name} is {shown(token)}; it must be a string or an object with a string `content`"
        )
    return text
