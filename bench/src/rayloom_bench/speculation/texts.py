"""The conversations of `bench speculation`: texts to copy, and plain questions."""

from __future__ import annotations

from rayloom_bench.quality.forms import fixed_text

Messages = list[dict[str, str]]

_QUESTIONS = (
    "Tell me about the history of Rome.",
    "How does a refrigerator keep food cold?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What should I look at when I buy a used bicycle?",
    "Explain to a child why the sky is blue.",
    "Give me some advice for my first week in a new job.",
    "Describe a walk through a forest in autumn.",
    "What are the advantages and disadvantages of living in a large city?",
)


def conversations(kind: str, num: int) -> list[Messages]:
    """Returns `num` conversations of a kind: copy or chat."""
    texts = _QUESTIONS if kind == "chat" else [f"Repeat this text exactly:\n\n{text}" for text in _paragraphs()]
    return [[{"role": "user", "content": texts[number % len(texts)]}] for number in range(num)]


def _paragraphs() -> list[str]:
    """Returns parts of the fixed text with about 120 tokens each."""
    words = fixed_text().split()
    return [" ".join(words[start : start + 90]) for start in range(0, len(words) - 90, 90)]
