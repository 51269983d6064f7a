"""Tokenizer and incremental detokenizers, with byte-level vocabularies and a vocabulary like SentencePiece's."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from rayloom_engine.errors import ModelError, RequestError
from rayloom_engine.models.checkpoint.source import resolve
from rayloom_engine.text.detokenizer import make_detokenizer
from rayloom_engine.text.tokenizer import DECODED_ALONE, Tokenizer
from rt_byte_model import END, START, byte_model


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    return Tokenizer.load(resolve("builtin://smollm2-135m", None).path)


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """A tokenizer like Llama 2's: words with U+2581 for a blank, byte tokens for everything else."""
    vocab = {"<unk>": 0, "</s>": 1, "\u2581": 2, "\u2581Hello": 3, "\u2581world": 4, "s": 5, "!": 6}
    vocab |= {f"<0x{byte:02X}>": 7 + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(backend, {})


def pieces(tokenizer: Tokenizer, ids: list[int], *, prompt: tuple[int, ...] = (), skip: bool = True) -> list[str]:
    """The text of each id, and the text that `finish` returns."""
    detokenizer = make_detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.finish()]


def test_a_character_comes_out_with_its_last_byte(bytewise: Tokenizer) -> None:
    assert pieces(bytewise, list("a\U0001f600b".encode())) == ["a", "", "", "", "\U0001f600", "b", ""]


def test_a_broken_character_is_replaced_when_the_next_one_begins(bytewise: Tokenizer) -> None:
    assert pieces(bytewise, [0xF0, 0x9F, 0x41]) == ["", "", "\ufffdA", ""]


def test_a_half_character_at_the_end_is_replaced_at_the_end(bytewise: Tokenizer) -> None:
    assert pieces(bytewise, [0x41, 0xC3]) == ["A", "", "\ufffd"]


def test_special_tokens_are_left_out_unless_requested(bytewise: Tokenizer) -> None:
    assert pieces(bytewise, [START, 72, END]) == ["", "H", "", ""]
    assert pieces(bytewise, [START, 72, END], skip=False) == ["<|im_start|>", "H", "<|im_end|>", ""]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data(), skip=st.booleans())
def test_pieces_together_equal_the_full_decode(embedded: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, embedded.vocab_size - 1), max_size=40))
    parts = pieces(embedded, ids, skip=skip)
    assert "".join(parts) == embedded.decode(ids, skip_special_tokens=skip)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.text(st.characters(min_codepoint=0x20, exclude_categories=["Cs", "Cc", "Cn"]), max_size=30))
def test_any_text_survives_the_round_trip(embedded: Tokenizer, text: str) -> None:
    ids = embedded.encode(text, add_special_tokens=False)
    assert "".join(pieces(embedded, ids, skip=False)) == text


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 255), max_size=12))
def test_any_bytes_give_the_text_of_the_library(bytewise: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(bytewise, ids)) == bytewise.decode(ids)


def test_digits_are_split_and_blanks_kept(embedded: Tokenizer) -> None:
    ids = embedded.encode("a  12")
    assert [embedded.token_bytes(token_id) for token_id in ids] == [b"a", b"  ", b"1", b"2"]


def test_words_keep_their_blanks_after_a_prompt(sentencepiece: Tokenizer) -> None:
    assert pieces(sentencepiece, [4, 5, 6], prompt=(3,)) == [" world", "s", "!", ""]
    assert pieces(sentencepiece, [3, 4]) == ["Hello", " world", ""]


def test_byte_tokens_wait_for_the_whole_character(sentencepiece: Tokenizer) -> None:
    ids = [3, *(7 + byte for byte in "\u00e9\U0001f600".encode()), 6]
    parts = pieces(sentencepiece, ids, prompt=(3,))
    assert parts == [" Hello", "", "\u00e9", "", "", "", "\U0001f600", "!", ""]


def test_broken_bytes_do_not_hold_back_the_text_for_ever(sentencepiece: Tokenizer) -> None:
    parts = pieces(sentencepiece, [7 + 0xFF] * 20, prompt=(3,))
    assert "".join(parts) == "\ufffd" * 20
    assert parts[7] != ""


def test_token_bytes_of_a_sentencepiece_vocabulary(sentencepiece: Tokenizer) -> None:
    assert [sentencepiece.token_bytes(token_id) for token_id in (4, 5, 7 + 0xF0)] == [b" world", b"s", b"\xf0"]


def test_a_bos_that_only_the_settings_ask_for_is_added(bytewise: Tokenizer) -> None:
    wanting = Tokenizer(bytewise.backend, {"bos_token": {"content": "<|im_start|>"}, "add_bos_token": True})
    assert wanting.encode("H") == [START, 72]
    assert wanting.encode("H", add_special_tokens=False) == [72]


def test_half_a_surrogate_pair_is_refused(bytewise: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        bytewise.encode("a\ud800")


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be used"):
        Tokenizer.load(tmp_path)


def test_long_lists_of_tokens_are_decoded_as_short_ones(bytewise: Tokenizer) -> None:
    ids = bytewise.encode("aé\n" * 1000)
    assert len(ids) > DECODED_ALONE
    assert bytewise.decode(ids) == "aé\n" * 1000


def test_special_tokens_that_a_parser_reads_are_kept(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_model(tmp_path / "model"))
    detokenizer = make_detokenizer(tokenizer, kept_ids=(START,))
    assert "".join(detokenizer.add(token_id) for token_id in (START, 65, END, 66)) == "<|im_start|>AB"
