"""PromptSearch: the steps of a beam search over one prompt. Pure.

Each step continues every live beam by its most likely tokens, and the best of all continuations are the next live
beams. A continuation that ends with a stop token is finished: a candidate for the answers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from rayloom_engine.core.step import TokenLogprobs

# A continuation of a live beam by a token: (log-probability of all its tokens, index of the beam, index of the token in
# the beam's entry)
_Step = tuple[float, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSettings:
    """The settings of one search."""

    width: int  # number of live beams, and of answers
    max_tokens: int
    min_tokens: int = 0  # a stop token ends no beam with fewer tokens
    stop_ids: Collection[int] = ()
    length_penalty: float = 1.0
    num_top: int | None = None  # alternatives of each token that the answer shows; None = no log-probabilities

    @property
    def num_alternatives(self) -> int:
        """Number of most likely tokens that a step needs, so that at least `width` of them are no stop tokens."""
        return self.width + max(self.width, len(self.stop_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """A possible beginning of the answer, or a whole answer."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0  # sum over the tokens
    entries: tuple[TokenLogprobs, ...] = ()  # log-probabilities of the tokens, if the request asks for them
    stop_id: int | None = None  # the last token, if it ended the answer


@dataclass(slots=True, kw_only=True)
class PromptSearch:
    """The search over one prompt of `prompt_len` tokens."""

    settings: BeamSettings
    prompt_len: int
    live: list[Beam] = field(default_factory=lambda: [Beam()])
    finished: list[Beam] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """True if another step may change the best answers."""
        if not self.live or len(self.live[0].token_ids) >= self.settings.max_tokens:
            return False
        scores = sorted((self._score(beam) for beam in self.finished), reverse=True)[: self.settings.width]
        return len(scores) < self.settings.width or self._best_possible() > scores[-1]

    def advance(self, entries: Sequence[TokenLogprobs]) -> None:
        """Continues the live beams. `entries`: for each live beam, the most likely next tokens.

        Only the continuations that are kept get token ids of their own. A wide search has 100,000 possible
        continuations in a step. The token ids of each would be a copy of its whole beam.
        """
        settings = self.settings
        open_ones: list[_Step] = []
        ended: list[_Step] = []
        for place, (beam, entry) in enumerate(zip(self.live, entries, strict=True)):
            may_end = len(beam.token_ids) >= settings.min_tokens
            num_open = 0
            # An entry may have more tokens, for the alternatives that the answer shows. They do not change the beams.
            for rank, (token_id, logprob) in enumerate(entry.top[: settings.num_alternatives]):
                if token_id in settings.stop_ids:
                    if may_end:
                        ended.append((beam.logprob + logprob, place, rank))
                elif num_open < settings.width:  # at most `width` continuations of one beam can be kept
                    num_open += 1
                    open_ones.append((beam.logprob + logprob, place, rank))
        self.finished = self._best([*self.finished, *self._continued(ended, entries)])
        self.live = self._continued(open_ones, entries)

    def _continued(self, steps: list[_Step], entries: Sequence[TokenLogprobs]) -> list[Beam]:
        """Returns the most likely `width` continuations of the live beams."""
        # The sort is stable: equally likely continuations keep the order of their beams.
        steps.sort(key=lambda step: -step[0])
        longer = []
        for logprob, place, rank in steps[: self.settings.width]:
            beam = self.live[place]
            token_id, own_logprob = entries[place].top[rank]
            longer.append(
                Beam(
                    token_ids=(*beam.token_ids, token_id),
                    logprob=logprob,
                    entries=beam.entries + self._shown(entries[place], token_id, own_logprob, rank + 1),
                    stop_id=token_id if token_id in self.settings.stop_ids else None,
                )
            )
        return longer

    def answers(self) -> list[Beam]:
        """Returns the best beams, finished or cut by max_tokens; the best beam first."""
        return self._best([*self.finished, *self.live])

    def _best(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=lambda beam: -self._score(beam))[: self.settings.width]

    def _score(self, beam: Beam) -> float:
        """Returns the sum of log-probabilities, divided by a power of the length. As in vLLM, the length includes the
        prompt."""
        return beam.logprob / self._divisor(self._length(beam))

    def _length(self, beam: Beam) -> int:
        return max(1, self.prompt_len + len(beam.token_ids) - (beam.stop_id is not None))

    def _best_possible(self) -> float:
        """Returns an upper bound for the scores of continued live beams: further tokens count with probability 1."""
        first = self.live[0]  # the most likely live beam; all live beams are equally long
        return first.logprob / max(
            self._divisor(self._length(first)), self._divisor(self.prompt_len + self.settings.max_tokens)
        )

    def _divisor(self, length: int) -> float:
        return float(length**self.settings.length_penalty)

    def _shown(self, entry: TokenLogprobs, token_id: int, logprob: float, rank: int) -> tuple[TokenLogprobs, ...]:
        if self.settings.num_top is None:
            return ()
        return (TokenLogprobs(token_id, logprob, rank, entry.top[: self.settings.num_top]),)
