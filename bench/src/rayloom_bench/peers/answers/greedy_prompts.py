"""The 20 prompts whose greedy answers are compared: texts of many kinds, long and short, and chats."""

from __future__ import annotations

from pathlib import Path

from rayloom_engine.text.chat_template import ChatTemplate
from rayloom_engine.text.tokenizer import Tokenizer

NUM_OUTPUT = 64
TEXTS = (
    "Hello",
    "A",
    "The quick brown fox",
    "Water boils at 100 degrees Celsius, which is",
    "3.14159265358979 is the beginning of",
    "a  12  345 6789 and 0.5 + 0.25 =",
    "def quicksort(items: list[int]) -> list[int]:\n    ",
    "#include <stdio.h>\n\nint main(void) {\n\tprintf(",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics",',
    "SELECT name, COUNT(*) FROM orders WHERE",
    "Die Hauptstadt von Österreich ist",
    "El niño comió una manzana porque",
    "日本の首都は",
    "Emoji test: 🎉🚀👩‍👩‍👧 and then",
    "\n\n\n",
    "The history of the steam engine begins long before James Watt. " * 24,
    "one two three four five six seven eight nine ten " * 40,
)
CHATS = (
    [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
    [
        {"role": "user", "content": "My name is Grace and I like trains."},
        {"role": "assistant", "content": "Nice to meet you, Grace!"},
        {"role": "user", "content": "What do I like?"},
    ],
    [
        {"role": "system", "content": "You answer like a pirate."},
        {"role": "user", "content": "How do I cook rice?"},
        {"role": "assistant", "content": "Arr, boil it in twice its water."},
        {"role": "user", "content": "For how long?"},
    ],
)


def prompts(folder: Path) -> tuple[tuple[int, ...], ...]:
    """The token ids of the 20 prompts with the tokenizer and the chat template of a checkpoint."""
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder, tokenizer.special_tokens)
    assert template is not None  # the built-in model has a template
    chats = (tokenizer.encode(template.render(chat), add_special_tokens=False) for chat in CHATS)
    return tuple(tuple(ids) for ids in (*(tokenizer.encode(text) for text in TEXTS), *chats))
