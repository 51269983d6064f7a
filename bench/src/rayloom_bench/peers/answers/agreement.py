"""Compares greedy answers of an engine with those of transformers in float32, token by token.

Answers are compared up to the first end token, because some engines return this token and others do not. Requests do
not set `ignore_eos`, because llama.cpp would then forbid the end token. So the model itself ends the answers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayloom_bench.child import run_child
from rayloom_bench.endpoint import Endpoint, EndpointError, call_json
from rayloom_bench.machine import NAMED_PACKAGES, package_versions
from rayloom_bench.peers.answers.greedy_prompts import NUM_OUTPUT
from rayloom_bench.peers.names import Dialect

MODULE = "rayloom_bench.peers.answers.reference"
# llama.cpp ends an answer at either token, even if the model's config names only one of them
END_TOKENS = ("<|im_end|>", "<|endoftext|>")
ANSWER_S = 120

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The comparison of one engine's answers with the reference."""

    num_equal: int
    num_prompts: int
    lengths: tuple[int, ...]  # for each prompt: the number of tokens before the first difference

    @property
    def mean_length(self) -> float:
        return sum(self.lengths) / len(self.lengths)


def compare(answers: Sequence[Ids], reference: Sequence[Ids], end_ids: frozenset[int]) -> Agreement:
    """The agreement of the answers to the same prompts. There must be at least one prompt."""
    pairs = [
        (until_end(ours, end_ids), until_end(theirs, end_ids)) for ours, theirs in zip(answers, reference, strict=True)
    ]
    return Agreement(
        num_equal=sum(ours == theirs for ours, theirs in pairs),
        num_prompts=len(pairs),
        lengths=tuple(equal_length(ours, theirs) for ours, theirs in pairs),
    )


def until_end(ids: Ids, end_ids: frozenset[int]) -> Ids:
    """The ids before the first end token, which is one of `end_ids`."""
    for position, token_id in enumerate(ids):
        if token_id in end_ids:
            return ids[:position]
    return ids


def equal_length(ours: Ids, theirs: Ids) -> int:
    """The number of tokens before the first difference."""
    for position, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return position
    return min(len(ours), len(theirs))


def end_ids(folder: Path) -> frozenset[int]:
    """The ids of END_TOKENS in a checkpoint's tokenizer.json."""
    document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return frozenset(token["id"] for token in document["added_tokens"] if token["content"] in END_TOKENS)


def reference_answers(folder: Path, prompts: Sequence[Ids], *, threads: int, cache: Path) -> tuple[Ids, ...]:
    """The answers of transformers in float32, read from the folder `cache` if it has them. Raises ChildFailed.

    The key in the cache is a hash of all inputs of the answers: prompts, model folder and versions.
    """
    versions = {name: version for name, version in package_versions().items() if name in NAMED_PACKAGES}
    key = hashlib.sha256(json.dumps([folder.name, prompts, NUM_OUTPUT, versions]).encode()).hexdigest()[:12]
    file = cache / f"reference-{key}.json"
    if file.exists():
        answers = json.loads(file.read_text(encoding="utf-8"))
    else:
        job = {"folder": str(folder), "prompts": prompts, "num_output": NUM_OUTPUT, "threads": threads}
        answers = run_child(MODULE, job, threads=threads)["answers"]
        cache.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(answers), encoding="utf-8")
        partial.rename(file)
    return tuple(tuple(ids) for ids in answers)


def answers_of(endpoint: Endpoint, prompts: Sequence[Ids], dialect: Dialect) -> tuple[Ids, ...]:
    """The server's greedy answers, requested one after the other. Raises EndpointError."""
    return tuple(_answer(endpoint, prompt, dialect) for prompt in prompts)


def _answer(endpoint: Endpoint, prompt: Ids, dialect: Dialect) -> Ids:
    if dialect == "llama.cpp":
        body = {"prompt": prompt, "n_predict": NUM_OUTPUT, "temperature": 0, "return_tokens": True}
        answer = call_json(f"{endpoint.base_url}/completion", body, timeout_s=ANSWER_S)
        ids = answer.get("tokens")
    else:
        body = {
            "model": endpoint.model_name,
            "prompt": prompt,
            "max_tokens": NUM_OUTPUT,
            "temperature": 0,
            "return_token_ids": True,
        }
        choices = call_json(f"{endpoint.base_url}/v1/completions", body, timeout_s=ANSWER_S).get("choices")
        ids = choices[0].get("token_ids") if isinstance(choices, list) and choices else None
    if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
        raise EndpointError(f"{endpoint.base_url} answers without a list of token ids")
    return tuple(ids)
