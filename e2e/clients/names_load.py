"""Requests for two models and an alias of both at an LLMGateway, and the comparison of their answers.

The answers of the two models differ, so a request that reached the wrong model is noticed. An answer to a request
for the alias is compared with the answer of the model that the header X-Rayloom-Model names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clients.gateways import ModelsGateway
from clients.mixed_load import NUM_TOKENS, Answers, MixedLoad, Request, undisturbed_mix

FIRST, SECOND, ALIAS = "one", "two", "either"
# The model name in each request of MixedLoad. Requests 3 and 11 have a stop string. They are for the first model,
# because the string is a part of that model's answer.
_NAMES = (
    *(SECOND, ALIAS, FIRST, FIRST, SECOND, ALIAS, FIRST, SECOND),
    *(ALIAS, SECOND, FIRST, FIRST, ALIAS, SECOND, ALIAS, ALIAS),
)
# The second model is faster, because it runs in bfloat16. Its answers are longer by this factor, so that they still run
# when a disturbance happens.
_LONGER = 2.5


@dataclass(frozen=True, slots=True)
class NamesLoad:
    """16 requests, and their answers without a disturbance."""

    by_model: Mapping[str, MixedLoad]

    @property
    def answers(self) -> Answers:
        """The undisturbed answers. For requests to the alias, these are the first model's answers."""
        names = (name if name in self.by_model else FIRST for name in _NAMES)
        return [self.by_model[name].answers[index] for index, name in enumerate(names)]

    def requests(self, num_tokens: int = NUM_TOKENS) -> list[Request]:
        """The requests: `num_tokens` tokens for the first model, and more for the second model and the alias."""
        made = self.by_model[FIRST].requests(num_tokens)
        for request, name in zip(made, _NAMES, strict=True):
            request["body"]["model"] = name
            if name != FIRST:
                request["body"]["max_tokens"] = int(num_tokens * _LONGER)
        return made

    def long_for_second(self, num_tokens: int) -> list[Request]:
        """The requests. Requests for the second model have this number of tokens."""
        made = self.requests()
        for request in made:
            if request["body"]["model"] == SECOND:
                request["body"]["max_tokens"] = num_tokens
        return made

    def first_alone(self, num_tokens: int) -> list[Request]:
        """The requests, all with this number of tokens and for the first model."""
        made = self.requests(num_tokens)
        for request in made:
            request["body"] |= {"model": FIRST, "max_tokens": num_tokens}
        return made

    def without_second(self, num_tokens: int) -> list[Request]:
        """The requests for this number of tokens, with the alias instead of the second model."""
        made = self.requests(num_tokens)
        for request in made:
            if request["body"]["model"] == SECOND:
                request["body"]["model"] = ALIAS
        return made

    def problem_of(self, stream: dict[str, Any]) -> str:
        """Returns the failure of a stream; empty if its answer equals the undisturbed answer or a prefix of it."""
        model = stream["served_by"] or stream["model"]
        if stream["failure"] or model in self.by_model:
            return self.by_model.get(model, self.by_model[FIRST]).problem_of(stream)
        return f"an answer for {stream['model']} is said to come from {model!r}"


def undisturbed_names(gateway: ModelsGateway) -> NamesLoad:
    """The load with the answers of undisturbed runs. Fails unless the answers of the two models differ."""
    found = NamesLoad({model: undisturbed_mix(gateway, model) for model in (FIRST, SECOND)})
    assert found.by_model[FIRST].answers != found.by_model[SECOND].answers, "these are other numbers"
    return found
