"""AnswerBook: the answers that a repeated request finds, and the release of answers."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rayloom_engine.front.idempotency.answer_book import AnswerBook, Entry, KeepLimits, KeyReused

LIMITS = KeepLimits(seconds=30.0, max_answers=5, max_bytes=1000, max_detached_choices=4, max_detached_tokens=500)


def entry(
    key: str, *, digest: bytes = b"body", is_strict: bool = True, tenant: str = "", choices: int = 1
) -> Entry[str]:
    return Entry(key=key, digest=digest, tenant=tenant, is_strict=is_strict, answer=key, num_choices=choices)


def names(released: list[Entry[str]]) -> list[str]:
    return [each.answer for each in released]


def broken(book: AnswerBook[str], new: Entry[str], at_s: float) -> list[str]:
    """Adds an entry whose reader leaves at once. Returns the names of released entries."""
    return names(book.add(new) + book.leave(new, at_s, is_whole=False))


def test_an_answer_whose_reader_left_is_found_for_30_seconds() -> None:
    book: AnswerBook[str] = AnswerBook(LIMITS)
    first = entry("a")
    assert broken(book, first, 100.0) == []
    assert book.expire(129.9) == []
    assert book.find("a", b"body") is first
    assert names(book.expire(130.0)) == ["a"]
    assert book.find("a", b"body") is None


def test_a_reader_stops_the_time_and_the_end_of_the_computation_begins_it_again() -> None:
    book: AnswerBook[str] = AnswerBook(LIMITS)
    first = entry("a")
    broken(book, first, 100.0)
    book.join(first)
    assert book.expire(1000.0) == []
    assert book.leave(first, 1000.0, is_whole=False) == []
    assert book.end(first, 1020.0, is_good=True) == []
    assert book.expire(1049.0) == []
    assert names(book.expire(1050.0)) == ["a"]


def test_an_idempotency_key_with_another_body_is_refused() -> None:
    book: AnswerBook[str] = AnswerBook(LIMITS)
    book.add(entry("a"))
    with pytest.raises(KeyReused):
        book.find("a", b"other body")


def test_a_request_id_finds_only_an_answer_whose_connection_broke() -> None:
    book: AnswerBook[str] = AnswerBook(LIMITS)
    first = entry("a", is_strict=False)
    book.add(first)
    assert book.find("a", b"body") is None, "its client still reads"
    book.leave(first, 1.0, is_whole=False)
    assert book.find("a", b"body") is first
    book.join(first)
    book.end(first, 2.0, is_good=True)
    assert names(book.leave(first, 3.0, is_whole=True)) == ["a"], "its client has it"


def test_an_answer_by_request_id_is_computed_for_5_seconds_and_kept_for_30_once_it_is_whole() -> None:
    book: AnswerBook[str] = AnswerBook(LIMITS)
    running, finished = entry("a", is_strict=False), entry("b", is_strict=False)
    for each in (running, finished, entry("key")):
        broken(book, each, 100.0)
    assert book.num_detached == 3
    book.end(finished, 104.0, is_good=True)
    assert book.num_detached == 2
    assert book.expire(104.9) == []
    assert names(book.expire(105.0)) == ["a"]
    assert names(book.expire(133.9)) == ["key"]
    assert names(book.expire(134.0)) == ["b"]


def test_an_answer_by_request_id_is_not_computed_longer_than_answers_are_kept() -> None:
    book: AnswerBook[str] = AnswerBook(KeepLimits(seconds=2.0))
    broken(book, entry("a", is_strict=False), 100.0)
    assert book.expire(101.9) == []
    assert names(book.expire(102.0)) == ["a"]


def test_a_second_request_with_the_id_of_a_running_one_takes_its_place() -> None:
    book: AnswerBook[str] = AnswerBook(LIMITS)
    first, second = entry("a", is_strict=False), entry("a", is_strict=False)
    book.add(first)
    assert book.add(second) == [first]
    assert book.leave(first, 1.0, is_whole=False) == []
    book.leave(second, 1.0, is_whole=False)
    assert book.find("a", b"body") is second


def test_a_failed_answer_is_not_kept() -> None:
    book: AnswerBook[str] = AnswerBook(LIMITS)
    first = entry("a")
    book.add(first)
    assert book.end(first, 1.0, is_good=False) == [first]


def test_of_too_many_answers_without_a_reader_the_key_with_the_most_loses_its_oldest() -> None:
    book: AnswerBook[str] = AnswerBook(LIMITS)
    assert broken(book, entry("other", tenant="other"), 1.0) == []
    for number in range(3):
        assert broken(book, entry(f"crowd{number}", tenant="crowd"), 2.0 + number) == []
    assert broken(book, entry("crowd3", tenant="crowd"), 9.0) == ["crowd0"]
    assert broken(book, entry("wide", tenant="other", choices=5), 10.0) == ["other", "wide"]


def test_tokens_of_answers_without_a_reader_are_limited_as_they_grow() -> None:
    book: AnswerBook[str] = AnswerBook(LIMITS)
    first, second = entry("a"), entry("b")
    broken(book, first, 1.0)
    broken(book, second, 2.0)
    first.num_tokens = second.num_tokens = 250
    assert book.expire(3.0) == []
    second.num_tokens = 251
    assert names(book.expire(4.0)) == ["a"]


def test_finished_answers_without_a_reader_make_room_first() -> None:
    book: AnswerBook[str] = AnswerBook(LIMITS)
    read, finished = entry("read"), entry("finished")
    book.add(read)
    broken(book, finished, 1.0)
    book.end(finished, 2.0, is_good=True)
    assert book.grow(finished, 600) == []
    assert names(book.grow(read, 401)) == ["finished"]
    assert names(book.grow(read, 600)) == ["read"], "a single answer may be too large"
    assert (len(book), book.num_bytes) == (0, 0)


class Books(RuleBasedStateMachine):
    """In any order of events, the book keeps its limits and loses no answer without a reason."""

    def __init__(self) -> None:
        super().__init__()
        self.book: AnswerBook[str] = AnswerBook(LIMITS)
        self.now_s = 0.0
        self.entries: list[Entry[str]] = []
        self.released: list[Entry[str]] = []

    def note(self, released: list[Entry[str]]) -> None:
        self.released += released
        assert not any(each.is_kept for each in released)

    def known(self, number: int) -> Entry[str]:
        return self.entries[number % len(self.entries)]

    @rule(key=st.sampled_from("abcdefg"), is_strict=st.booleans(), tenant=st.sampled_from("xy"), n=st.integers(1, 3))
    def request(self, key: str, is_strict: bool, tenant: str, n: int) -> None:
        name = f"{key}{is_strict}"
        found = self.book.find(name, b"body")
        if found is not None:
            self.book.join(found)
            return
        new = entry(name, is_strict=is_strict, tenant=tenant, choices=n)
        self.entries.append(new)
        self.note(self.book.add(new))

    @precondition(lambda self: self.entries)
    @rule(number=st.integers(0, 50), is_whole=st.booleans())
    def leave(self, number: int, is_whole: bool) -> None:
        chosen = self.known(number)
        if chosen.num_readers:
            self.note(self.book.leave(chosen, self.now_s, is_whole=is_whole and not chosen.is_running))

    @precondition(lambda self: self.entries)
    @rule(number=st.integers(0, 50), is_good=st.booleans())
    def end(self, number: int, is_good: bool) -> None:
        chosen = self.known(number)
        if chosen.is_running:
            self.note(self.book.end(chosen, self.now_s, is_good=is_good))

    @precondition(lambda self: self.entries)
    @rule(number=st.integers(0, 50), num_bytes=st.integers(0, 400), num_tokens=st.integers(0, 300))
    def grow(self, number: int, num_bytes: int, num_tokens: int) -> None:
        chosen = self.known(number)
        if chosen.is_running:
            chosen.num_tokens = num_tokens
            self.note(self.book.grow(chosen, num_bytes))

    @rule(seconds=st.floats(0.0, 40.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.note(self.book.expire(self.now_s))
        kept = [each for each in self.entries if each.is_kept]
        for each in kept:
            assert each.num_readers or (each.idle_since_s or 0.0) > self.now_s - LIMITS.seconds
        assert sum(each.num_tokens for each in kept if each.is_detached) <= LIMITS.max_detached_tokens

    @invariant()
    def limits_hold(self) -> None:
        kept = [each for each in self.entries if each.is_kept]
        assert len(self.book) == len(kept) <= LIMITS.max_answers
        assert self.book.num_bytes == sum(each.num_bytes for each in kept) <= LIMITS.max_bytes
        assert sum(each.num_choices for each in kept if each.is_detached) <= LIMITS.max_detached_choices
        assert self.book.has_idle == any(each.num_readers == 0 for each in kept)

    @invariant()
    def each_is_released_once(self) -> None:
        gone = [each for each in self.entries if not each.is_kept]
        assert len(self.released) == len(gone)
        assert {id(each) for each in self.released} == {id(each) for each in gone}

    @invariant()
    def a_key_finds_its_answer(self) -> None:
        for each in self.entries:
            if each.is_kept and each.is_strict:
                assert self.book.find(each.key, b"body") is each


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
