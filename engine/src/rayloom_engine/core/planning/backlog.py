"""Backlog: the prompts that a step could compute, and how long they may make the running streams wait.

On a CPU, a step whose whole token budget goes to prompts takes ten to forty times as long as a step with decodes alone.
Every stream waits for such a step. On the other hand, a step with few prompt tokens reads the same weights as a step
with many. So prompts that are spread over many steps end later, and fewer sequences decode together. The rules here
weigh the number of streams that would wait against the number of prompts that would end earlier.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_engine.core.step_seconds import StepSeconds

# A long prompt lengthens a step with decodes by at most this share of the decodes' time. The times of steps vary, but
# with this limit the time between two tokens of a stream stays below twice its usual value.
_SHARE = 0.7
# Several prompts may lengthen a step with decodes to at most this many times the time of a reference step. The
# reference step has one more decode in place of each of these prompts.
_PACE = 2.2
# A single prompt gets as much time in a step as several prompts would, if it then needs at most this many steps.
_FEW_STEPS = 4


@dataclass(frozen=True, slots=True)
class Prompt:
    num_left: int  # tokens that are not computed yet; >= 1
    num_tokens: int  # tokens in all


@dataclass(frozen=True, slots=True)
class Backlog:
    num_streams: int  # decodes of sequences that have a token already: a longer step delays their next token
    num_decodes: int  # all decodes of the step
    prompts: tuple[Prompt, ...]  # prompts in the order in which they are computed; not empty

    @property
    def size(self) -> int:
        """Tokens of all prompts / tokens of the longest, rounded: 3 for 3 equal prompts, 1 if all others are tiny."""
        num_tokens = [prompt.num_tokens for prompt in self.prompts]
        return int(sum(num_tokens) / max(num_tokens) + 0.5)

    @property
    def is_crowd(self) -> bool:
        """True if prompts may use the whole token budget: no stream waits, or `size` is >= 2 and >= `num_streams`."""
        return self.num_streams == 0 or self.size >= max(2, self.num_streams)

    def seconds(self, costs: StepSeconds) -> float | None:
        """Returns by how many seconds prompts may lengthen the step; None: only the token budget limits them."""
        if self.is_crowd:
            return None
        decode_s = costs.decode_s(self.num_decodes)
        paced_s = _PACE * costs.decode_s(self.num_decodes + len(self.prompts)) - decode_s
        longest_s = costs.token_s * max(prompt.num_tokens for prompt in self.prompts)
        if self.size > 1 or longest_s <= _FEW_STEPS * paced_s:
            return max(_SHARE * decode_s, paced_s)
        return _SHARE * decode_s

    def leaves_last_tokens(self, budget: int) -> bool:
        """True if prompts that could end in this step shall leave their last token to the next step.

        True if `is_crowd` and at least two prompts remain for later steps. A prompt that ends in this step begins a
        stream, and after its first token the stream would have to wait for the remaining prompts. False if one of the
        remaining prompts is longer than the `budget`: the stream would then wait for several steps of this prompt, even
        if the stream began in the next step.
        """
        if not self.is_crowd:
            return False
        left = budget - self.num_decodes
        staying = []
        for prompt in self.prompts:
            if prompt.num_left > left:
                staying.append(prompt)
            left = max(0, left - prompt.num_left)
        return len(staying) > 1 and all(prompt.num_left <= budget for prompt in staying)
