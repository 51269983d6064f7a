"""The limit of a model's reasoning: begin and end of the reasoning, tokens that end it, replays, and forms after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.core.decoding import ThinkingBudget
from rayloom_engine.errors import RequestError
from rayloom_engine.llm import LLM
from rayloom_engine.sampling_params import SamplingParams
from rayloom_engine.structured_outputs import StructuredOutputs
from rayloom_engine.text.message_parsing.parser import ParserSettings
from rayloom_engine.text.message_parsing.reasoning_formats import QWEN3
from rayloom_engine.text.message_parsing.tool_formats import HARMONY, HERMES, TOOL_FORMATS
from rayloom_engine.text.thinking_budget import thinking_budget, with_thinking
from rayloom_engine.text.tokenizer import Tokenizer
from rayloom_engine.worker.thinking import Thinking, mask_of
from rt_forms import EOS, ids_of, tiny_vocabulary, token_folder
from rt_messages import parser
from rt_tiny import tiny_checkpoint, tiny_tokenizer

END = "</think>"


def begun(num_tokens: int, *, start: str = "", ends: tuple[str, ...] = (END,), calls: str = "") -> Thinking:
    end_ids = tuple(ids_of(ends[0]))
    budget = ThinkingBudget(num_tokens=num_tokens, start=start, ends=ends, end_ids=end_ids, calls=calls)
    return Thinking(budget, tiny_vocabulary().token_bytes)


def answer_of(thinking: Thinking, wanted: str) -> str:
    """The text of a model that writes the forced tokens, and between them the characters of `wanted`."""
    written = ""
    left = iter(wanted)
    while True:
        forced = thinking.forced()
        token_id = forced if forced is not None else next((ids_of(char)[0] for char in left), None)
        if token_id is None:
            return written
        thinking.append([token_id])
        written += tiny_vocabulary().token_bytes(token_id).decode()


@pytest.mark.parametrize(
    ("num_tokens", "start", "wanted", "expected"),
    [
        (3, "", "I think.", f"I t{END}hink."),
        (0, "", "Yes.", f"{END}Yes."),
        (10, "", f"No{END}then the answer", f"No{END}then the answer"),
        (5, "", f"Hm {END}x", f"Hm </{END}think>x"),  # the budget ends inside the tag
        (4, "<think>", "\n<think>Hm, so Yes", f"\n<think>Hm, {END}so Yes"),
        (4, "<think>", "An answer without <think>thoughts", "An answer without <think>thoughts"),
        (0, "<think>", "<think>Yes", f"<think>{END}Yes"),
        (10**9, "", "endless", "endless"),
    ],
)
def test_the_end_follows_the_last_token_of_the_budget(num_tokens: int, start: str, wanted: str, expected: str) -> None:
    assert answer_of(begun(num_tokens, start=start), wanted) == expected


def test_a_call_ends_the_reasoning_too() -> None:
    wanted = '<tool_call>{"name": "f"}'
    assert answer_of(begun(12, ends=(END, "<tool_call>")), wanted) == wanted
    assert answer_of(begun(12), wanted) == f'<tool_call>{{{END}"name": "f"}}'


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ('<tool_call>{"name": "f"}, and then', '<tool_call>{"name": "f"}, and then'),
        ("<tool_call> is the tag", f"<tool_call> i{END}s the tag"),
        # While a call may follow, no token is forced, not even after 12 tokens.
        ('<tool_call>{"name": f}', f'<tool_call>{{"name": f{END}}}'),
        ("<tool_call>" + 600 * " ", f"<tool_call>{512 * ' '}{END}{88 * ' '}"),
    ],
)
def test_the_mention_of_a_call_does_not_end_the_reasoning(wanted: str, expected: str) -> None:
    assert answer_of(begun(12, ends=(END, "<tool_call>"), calls="hermes"), wanted) == expected


BITS = ["<tool_call>", "<function=", "f>", "[TOOL_CALLS]", "[", "{", '{"name"', ":", '"f"', "f(", "é", " ", "<", END]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(token_folder())


@given(
    text=st.lists(st.sampled_from(BITS), max_size=9).map("".join),
    name=st.sampled_from(sorted(TOOL_FORMATS.keys() - {"harmony"})),
)
@settings(max_examples=200, deadline=None)
def test_the_budget_ends_at_the_character_at_which_the_parser_finds_the_end(
    text: str, name: str, tokenizer: Tokenizer
) -> None:
    parsing = ParserSettings(tools=TOOL_FORMATS[name], reasoning=QWEN3, is_open=True)
    found = thinking_budget(10**6, parsing, tokenizer)
    assert found is not None
    thinking = Thinking(found, tiny_vocabulary().token_bytes)
    reader = parser(TOOL_FORMATS[name], reasoning=QWEN3, is_open=True)
    for char in text:
        reader.add(char)
        thinking.append(ids_of(char))
        thinking.forced()
        assert (thinking._place.value == "over") == (reader.reasoning_end is not None)


@given(text=st.text("<think>/ x", max_size=40), num_tokens=st.integers(0, 20), cut=st.integers(0, 60))
@settings(max_examples=200)
def test_a_replay_from_any_token_forces_the_same_tokens(text: str, num_tokens: int, cut: int) -> None:
    whole = answer_of(begun(num_tokens), text)
    assert whole.find(END) <= num_tokens  # the budget, because each character is a token
    ids = ids_of(whole)
    step_by_step, replayed = begun(num_tokens), begun(num_tokens)
    for token_id in ids[:cut]:
        step_by_step.forced()
        step_by_step.append([token_id])
    replayed.append(ids[:cut])
    assert replayed.forced() == step_by_step.forced()
    assert replayed.forced() in (None, *ids[cut : cut + 1])


@pytest.mark.parametrize("token_id", [0, 31, 32, 63, 255])
def test_a_mask_allows_one_token(token_id: int) -> None:
    mask = mask_of(token_id, 256)
    assert [id for id in range(256) if mask[id // 32] >> (id % 32) & 1] == [token_id]


def test_the_formats_decide_where_reasoning_begins_and_ends(tokenizer: Tokenizer) -> None:
    def found(**settings) -> tuple[str, tuple[str, ...], str] | None:
        budget = thinking_budget(5, ParserSettings(**settings), tokenizer)
        return budget and (budget.start, budget.ends, budget.calls)

    assert found() is None
    assert found(reasoning=QWEN3) == ("<think>", (END,), "")
    assert found(reasoning=QWEN3, is_open=True, tools=HERMES) == ("", (END, "<tool_call>"), "hermes")
    start, ends, calls = found(is_harmony=True, tools=HARMONY) or ("", (), "")
    assert (start, ends[0], calls) == ("<|channel|>analysis<|message|>", "<|end|>", "")


def test_tokens_of_the_end_must_be_allowed(tokenizer: Tokenizer) -> None:
    parsing = ParserSettings(reasoning=QWEN3, is_open=True)
    params = SamplingParams(thinking_token_budget=2, allowed_token_ids=ids_of("ab"))
    with pytest.raises(RequestError, match='needs the tokens of "</think>", but allowed_token_ids lacks'):
        with_thinking(params, parsing, tokenizer)
    assert with_thinking(SamplingParams(thinking_token_budget=-1), parsing, tokenizer).thinking is None


@pytest.fixture(scope="module", params=["C library", "torch"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)
    tiny_tokenizer(folder, opens_reasoning=True)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setenv("RAYLOOM_CPU_ISA", "torch")
        # With 14 blocks, the answers below do not fit at the same time. So sequences are preempted.
        with LLM(str(folder), dtype="float32", num_kv_blocks=14, max_model_len=160, threads=1) as llm:
            yield llm


CHATS = [[{"role": "user", "content": text}] for text in ("Hi", "What?", "Why is that?")]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_after_the_budget_have_their_form_also_when_preempted(llm: LLM, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature,
        seed=7,
        max_tokens=90,
        thinking_token_budget=20,
        min_tokens=40,
        bad_words=["think"],
        structured_outputs=StructuredOutputs(regex="[0-9]{60}", after=END),
    )

    def ask(chats: list) -> list[tuple[int, ...]]:
        return [output.outputs[0].token_ids for output in llm.chat(chats, params, use_tqdm=False)]

    num_preemptions = llm._engine.stats().num_preemptions
    answers = ask(CHATS)
    assert llm._engine.stats().num_preemptions > num_preemptions
    digits = set(ids_of("0123456789"))
    for ids in answers:
        assert ids[20 : 20 + len(END)] == tuple(ids_of(END))
        form = ids[20 + len(END) :]
        assert (len(form), set(form[:-1]) <= digits, form[-1]) == (61, True, EOS)
    assert [ask([chat])[0] for chat in CHATS] == answers
    hits = llm._engine.stats().prefix_hits
    assert ask(CHATS[-1:]) == answers[-1:]
    assert llm._engine.stats().prefix_hits > hits


def test_a_budget_without_known_tags_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="use chat, or leave it out"):
        llm.generate("Hi", SamplingParams(thinking_token_budget=3), use_tqdm=False)


def test_choices_have_a_limit_of_allowed_ids_together(llm: LLM) -> None:
    with pytest.raises(RequestError, match="8192 ids for each of 128 choices"):
        llm.generate("Hi", SamplingParams(n=128, allowed_token_ids=range(8192)), use_tqdm=False)
