"""The conversations of `bench speculation`: texts to copy, records to copy into JSON, and plain questions."""

from __future__ import annotations

import random

from rayloom_bench.quality.forms import fixed_text
from rayloom_engine.structured_outputs import StructuredOutputs

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
_CUSTOMERS = ("Ada Novak", "Jonas Lindqvist", "Mei Tanaka", "Omar Haddad", "Ines Carvalho", "Tom Byrne")
_GOODS = ("lamp", "desk", "chair", "shelf", "mirror", "carpet", "clock", "vase")
_NUM_ORDERS = 8
# The answer has more than 128 tokens.
_ORDERS = {
    "type": "array",
    "minItems": _NUM_ORDERS,
    "items": {
        "type": "object",
        "properties": {
            "order_id": {"type": "string"},
            "customer": {"type": "string"},
            "article": {"type": "string"},
            "quantity": {"type": "integer"},
        },
        "required": ["order_id", "customer", "article", "quantity"],
    },
}


def form_of(kind: str) -> StructuredOutputs | None:
    """Returns the form of the answers to conversations of this kind; None: any answer."""
    return StructuredOutputs(json=_ORDERS) if kind == "json" else None


def conversations(kind: str, num: int) -> list[Messages]:
    """Returns `num` conversations of a kind: copy, json or chat."""
    if kind == "chat":
        texts = list(_QUESTIONS)
    elif kind == "json":
        texts = [_orders(random.Random(number)) for number in range(num)]
    else:
        texts = [f"Repeat this text exactly:\n\n{text}" for text in _paragraphs()]
    return [[{"role": "user", "content": texts[number % len(texts)]}] for number in range(num)]


def _orders(rng: random.Random) -> str:
    """Returns a request to write the orders of a list as JSON."""
    orders = [
        f"- order_id {rng.randrange(10**7):07d}-{rng.choice('ABCDEF')}, customer {rng.choice(_CUSTOMERS)}, "
        f"article {rng.choice(_GOODS)}, quantity {rng.randrange(1, 10)}"
        for _ in range(_NUM_ORDERS)
    ]
    return "Write these orders as a JSON array, in the same order:\n\n" + "\n".join(orders)


def _paragraphs() -> list[str]:
    """Returns parts of the fixed text with about 120 tokens each."""
    words = fixed_text().split()
    return [" ".join(words[start : start + 90]) for start in range(0, len(words) - 90, 90)]
