"""Factories for scheduler tests, and a simulated rank whose KV content can be checked."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import Origin, Sequence
from rayloom_engine.core.speculation.drafter import Drafter, Fit, SpeculationConfig
from rayloom_engine.core.step import (
    BrokenAdapter,
    DraftWork,
    NewSlot,
    PromptLogprobs,
    Proposal,
    SampledToken,
    SlotStep,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

BLOCK_SIZE = 4
VOCAB = 50
POISON = 1000  # a token that makes its own KV and the KV of all later tokens NaN; never sampled


def make_sequence(request_id: str = "a", prompt: SequenceOf[int] = (1, 2, 3), max_tokens: int = 4, **other) -> Sequence:
    params = other.pop("params", None) or DecodingParams(max_tokens=max_tokens, temperature=0.0)
    origin = Origin(**{name: other.pop(name) for name in _ORIGIN if name in other})
    return Sequence(request_id=request_id, prompt_ids=prompt, params=params, origin=origin, **other)


_ORIGIN = ("priority", "arrival", "tenant", "cache_key")


def make_scheduler(num_blocks: int = 11, **other) -> Scheduler:
    settings = {
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "max_model_len": num_blocks * BLOCK_SIZE,
        "max_queued": 100,
    }
    make_drafter = other.pop("make_drafter", None)
    grammars = other.pop("grammars", None)
    config = SchedulerConfig(num_blocks=num_blocks, **{**settings, **other})
    return Scheduler(config, make_drafter=make_drafter, grammars=grammars)


def next_token(token_ids: SequenceOf[int]) -> int:
    """The simulated model's token after `token_ids`. It depends on all of these ids."""
    digest = hashlib.sha256(bytes(str(list(token_ids)), "ascii")).digest()
    return int.from_bytes(digest[:4], "big") % VOCAB


def expected_ids(prompt: SequenceOf[int], num: int) -> list[int]:
    """The `num` ids that the model generates after `prompt`, however the steps are scheduled."""
    ids = list(prompt)
    for _ in range(num):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class SimulatedRank:
    """A rank that stores the ids from which each position of each block got its KV. It checks all reads.

    The rank learns ids from plans, like every stage except the last. Because of placeholders in plans, it also keeps
    the ids that it has sampled. Logits after POISON are not finite, and the id sampled from them is 0. A sequence must
    not read a block with another sequence's KV of POISON, even at a masked position. The logprob of a prompt token is
    minus its position.
    """

    def __init__(
        self,
        block_size: int = BLOCK_SIZE,
        window: int | None = None,
        keys: Mapping[str, bytes] | None = None,
        build_steps: dict[str, int] | None = None,
        nan_in_drafts: bool = False,
        late_masks: bool = False,
        guesses: SequenceOf[bool] = (),
        withholds: bool = False,
    ) -> None:
        """`window`: number of positions that a token reads, its own included. `keys`: request id -> cache key.

        `build_steps`: request id -> number of steps until its grammar is built. The rank counts these numbers down.
        `nan_in_drafts`: True: the KV of a third of the wrong draft tokens is NaN. `late_masks`: True: some tokens of
        sequences with masks are postponed once, and some of their drafts are verified in part. `guesses`: the rank has
        a draft model whose tokens are right at these positions, as in GuessingDrafter. `withholds`: True: the draft
        model does not answer a third of the questions, and half of these slots lag behind.
        """
        self._guesses = guesses
        self._withholds = withholds
        self.num_proposed_tokens = 0
        self._late_masks = late_masks
        self._were_late: set[tuple[str, int]] = set()  # (request id, number of its tokens) of late masks
        self.num_postponed_drafts = 0
        self._nan_in_drafts = nan_in_drafts
        self.num_accepted_tokens = self.num_rejected_tokens = 0  # tokens of drafts
        self._build_steps = build_steps if build_steps is not None else {}
        self._postponed: set[str] = set()
        self._block_size = block_size
        self._window = window
        self._keys = {} if keys is None else keys
        # (block, offset) -> cache key of the sequence, and its ids up to this place
        self._content: dict[tuple[int, int], tuple[bytes, tuple[int, ...]]] = {}
        # host slot -> the content of the block in it, by offset
        self._host: dict[int, dict[int, tuple[bytes, tuple[int, ...]]]] = {}
        self.num_loaded_blocks = 0
        self._slots: dict[int, tuple[NewSlot, list[int], list[int]]] = {}  # slot -> (new, token ids, block table)
        self._adapters: dict[int, bytes] = {}  # adapter slot -> digest
        self.broken_adapters: set[bytes] = set()  # digests of adapters that cannot be loaded
        self._unsent: dict[int, deque[int]] = {}  # slot -> sampled ids that no plan has sent yet
        self.num_computed_tokens = 0
        self.num_placeholders = 0

    def run(self, plan: StepPlan) -> StepResult:
        for load in plan.adapter_loads:
            self._adapters[load.slot] = b"" if load.adapter.digest in self.broken_adapters else load.adapter.digest
        for slot in plan.freed_slots:
            del self._slots[slot]
            del self._unsent[slot]
        for new in plan.new_slots:
            assert new.slot not in self._slots
            ids, table = [], []
            if new.prompt_of is not None:
                _, known_ids, known_table = self._slots[new.prompt_of]
                ids, table = known_ids[: new.num_prompt_tokens], known_table[: new.num_shared_blocks]
                assert (len(ids), len(table)) == (new.num_prompt_tokens, new.num_shared_blocks)
            self._slots[new.slot] = (new, [*ids, *new.token_ids], [*table, *new.block_table])
            self._unsent[new.slot] = deque()
        self._store(plan)
        for block in plan.cleared_blocks:
            for offset in range(self._block_size):
                self._content.pop((block, offset), None)
        self._load(plan)
        for source, target in plan.block_copies:
            for offset in range(self._block_size):
                self._content.pop((target, offset), None)
                if (source, offset) in self._content:
                    self._content[target, offset] = self._content[source, offset]
        for step in plan.slots:  # a layer writes the KV of the whole batch before it reads any KV
            new, ids, table = self._slots[step.slot]
            for token_id in step.new_token_ids:
                ids.append(token_id)
                if self._unsent[step.slot]:
                    assert self._unsent[step.slot].popleft() == token_id
            ids.extend(self._unsent[step.slot].popleft() for _ in range(step.num_placeholders))
            self.num_placeholders += step.num_placeholders
            table.extend(step.new_block_ids)
            computed = [*ids, *step.draft_token_ids]
            assert step.start + step.num_tokens <= len(computed), f"slot {step.slot} has no ids for what it computes"
            for position in range(step.start, step.start + step.num_tokens):
                content = tuple(computed[: position + 1])
                if self._gives_nan(ids, content):
                    content = (*content, POISON)
                self._content[self._place(table, position)] = self._key(new), content
        sampled, accepted, dirty, parts, corrupt, postponed, broken, proposals = [], [], [], [], [], [], [], []
        lagging, whole_blocks = [], []
        for step in plan.slots:
            new, ids, table = self._slots[step.slot]
            if new.adapter_slot >= 0 and not self._adapters[new.adapter_slot]:
                broken.append(BrokenAdapter(new.adapter_slot, (step.slot,), "broken"))
                continue
            assert new.adapter_slot < 0 or self._adapters[new.adapter_slot] == new.params.adapter_digest
            end = step.start + step.num_tokens - len(step.draft_token_ids)
            seen_from = 0 if self._window is None else max(0, step.start + 1 - self._window)
            for position in range(seen_from, end):
                read = self._content.get(self._place(table, position))
                mine = self._key(new), tuple(ids[: position + 1])
                assert read == mine, f"slot {step.slot} reads foreign KV at position {position}"
            whole = end + len(step.draft_token_ids)
            for offset in range((whole - 1) % self._block_size + 1, self._block_size):
                _, masked = self._content.get((table[(whole - 1) // self._block_size], offset), (b"", ()))
                assert POISON in ids or POISON not in masked, f"slot {step.slot} computes with a foreign NaN"
            last = min(end, new.num_prompt_tokens - 1)
            has_logprobs = new.params.prompt_logprobs is not None and step.start < last
            if POISON in ids[:end] and (step.samples or has_logprobs):
                corrupt.append(step.slot)
            elif has_logprobs:
                entries = tuple(TokenLogprobs(ids[place + 1], -1.0 - place, 1) for place in range(step.start, last))
                parts.append(PromptLogprobs(step.slot, step.start + 1, entries))
            self.num_computed_tokens += step.num_tokens
            assert step.samples == (end == len(ids))
            assert step.samples or not step.draft_token_ids, "a draft behind tokens that are missing"
            if step.samples and step.slot not in corrupt and self._is_late(new, ids):
                postponed.append(step.slot)
                self.num_postponed_drafts += bool(step.draft_token_ids)
                if any(self._gives_nan(ids, content) for content in _contents(ids, step.draft_token_ids)):
                    dirty.append(step.slot)
            elif step.samples and step.slot not in corrupt:
                tokens, is_dirty = self._verified(ids, step.draft_token_ids, self._num_masked(new, ids, step))
                accepted += [SampledToken(step.slot, token_id) for token_id in tokens[:-1]]
                sampled += [SampledToken(step.slot, token_id) for token_id in tokens[-1:]]
                self._unsent[step.slot].extend(tokens)
                if is_dirty:
                    dirty.append(step.slot)
                elif self._withholds and next_token([*ids, 9]) % 3 == 0:
                    if step.num_proposals and next_token([*ids, 10]) % 2:
                        lagging.append(step.slot)
                elif proposed := self._proposed(step, [*ids, *tokens], table):
                    proposals.append(Proposal(step.slot, proposed))
                    whole_blocks += table[seen_from // self._block_size : len(ids) // self._block_size]
            elif step.samples and step.slot not in postponed:
                self._unsent[step.slot].append(0)
        return StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            sampled=tuple(sampled),
            accepted=tuple(accepted),
            dirty_slots=tuple(dirty),
            prompt_logprobs=tuple(parts),
            corrupt_slots=tuple(corrupt),
            broken_adapters=tuple(broken),
            postponed_slots=tuple(postponed),
            proposals=tuple(proposals),
            draft_work=DraftWork(lagging_slots=tuple(lagging), whole_blocks=tuple(whole_blocks)),
            waiting_slots=tuple(self._slots_that_wait()),
        )

    def _proposed(self, step: SlotStep, ids: SequenceOf[int], table: list[int]) -> tuple[int, ...]:
        """The draft model's tokens after `ids`, as far as the slot has blocks for their KV."""
        if not self._guesses or not step.num_proposals:
            return ()
        room = len(table) * self._block_size - len(ids) + 1
        found = guessed(ids, min(step.num_proposals, room), self._guesses)
        self.num_proposed_tokens += len(found)
        return found

    def _store(self, plan: StepPlan) -> None:
        assert len({slot for _, slot in plan.host_stores}) == len(plan.host_stores), "two blocks for one slot"
        for block, slot in plan.host_stores:
            places = {offset: (block, offset) for offset in range(self._block_size)}
            found = {offset: self._content[place] for offset, place in places.items() if place in self._content}
            assert len(found) == self._block_size, f"block {block} is stored before it is full"
            self._host[slot] = found

    def _load(self, plan: StepPlan) -> None:
        assert len({block for _, block in plan.host_loads}) == len(plan.host_loads), "two contents for one block"
        for slot, block in plan.host_loads:
            self.num_loaded_blocks += 1
            for offset, content in self._host[slot].items():
                self._content[block, offset] = content

    def tear(self, plan: StepPlan) -> None:
        """Dies within a plan: its stores leave the slots half-written."""
        for _, slot in plan.host_stores:
            self._host[slot] = dict.fromkeys(range(self._block_size), (b"torn", ()))

    def lose_host_memory(self) -> None:
        self._host = {}

    def _is_late(self, new: NewSlot, ids: SequenceOf[int]) -> bool:
        """True if the slot's mask is not ready: its grammar is not built, or the step had no time for the mask."""
        if self._build_steps.get(new.request_id):
            self._postponed.add(new.request_id)
            return True
        place = (new.request_id, len(ids))
        if not (self._late_masks and new.params.has_mask) or place in self._were_late or next_token([*ids, 7]) % 4:
            return False
        self._were_late.add(place)
        return True

    def _num_masked(self, new: NewSlot, ids: SequenceOf[int], step: SlotStep) -> int:
        """The number of draft tokens that the rank verifies."""
        num = len(step.draft_token_ids)
        return next_token([*ids, 8]) % (num + 1) if self._late_masks and new.params.has_mask else num

    def _verified(self, ids: SequenceOf[int], draft: SequenceOf[int], most: int) -> tuple[list[int], bool]:
        """Returns a slot's tokens after a draft, and True if the draft is dirty: a wrong token of it gave NaN.

        If the draft is dirty, some tokens are missing. `most`: number of draft tokens that may be accepted.
        """
        tokens = [next_token(ids)]
        for token_id in draft[:most]:
            if token_id != tokens[-1]:
                break
            tokens.append(next_token([*ids, *tokens]))
        self.num_accepted_tokens += len(tokens) - 1
        self.num_rejected_tokens += len(draft) - len(tokens) + 1
        if any(self._gives_nan(ids, content) for content in _contents(ids, draft)):
            return tokens[: next_token([*ids, *draft]) % (len(tokens) + 1)], True
        return tokens, False

    def _gives_nan(self, ids: SequenceOf[int], content: tuple[int, ...]) -> bool:
        """True if the KV of `content`'s last token is NaN, as for some wrong draft tokens. `ids`: the known ids."""
        return (
            self._nan_in_drafts
            and len(content) > len(ids)
            and next_token(content[:-1]) != content[-1]
            and next_token(content) % 3 == 0
        )

    def _slots_that_wait(self) -> Iterator[int]:
        for slot, (new, _, _) in self._slots.items():
            left = self._build_steps.get(new.request_id, 0)
            self._build_steps[new.request_id] = max(0, left - 1)
            if left > 1 and new.request_id in self._postponed:
                yield slot

    def forget_all(self, keeps_memory: bool = False) -> None:
        """Empties all slots. `keeps_memory`: True if the rank's process survives. Then blocks keep their content."""
        self._slots = {}
        self._unsent = {}
        self._adapters = {}
        if not keeps_memory:
            self._content = {}

    def _key(self, new: NewSlot) -> bytes:
        in_slot = b"" if new.adapter_slot < 0 else self._adapters[new.adapter_slot]
        return self._keys.get(new.request_id, b"") + b"/" + in_slot

    def _place(self, table: list[int], position: int) -> tuple[int, int]:
        return table[position // self._block_size], position % self._block_size


def _contents(ids: SequenceOf[int], draft: SequenceOf[int]) -> list[tuple[int, ...]]:
    """The ids up to each token of the draft."""
    return [(*ids, *draft[: num + 1]) for num in range(len(draft))]


class GuessedGrammars:
    """Grammars that in turn cut a draft to its first tokens, force the right tokens, or are not built yet."""

    def __init__(self) -> None:
        self.turns: Counter[str] = Counter()
        self.num_begun = self.num_steps = 0

    def begin_step(self) -> None:
        self.num_steps += 1

    def begin(self, params: DecodingParams, num_prompt_tokens: int) -> GuessedGrammars:
        assert params.grammar and num_prompt_tokens
        self.num_begun += 1
        return self

    def fit(self, token_ids: SequenceOf[int], draft: tuple[int, ...], num: int) -> tuple[int, ...]:
        assert len(draft) <= num
        turn = ("cut", "forced", "missing")[next_token([*token_ids, 9]) % 3]
        self.turns[turn] += 1
        if turn == "cut":
            return draft[:1]
        return tuple(expected_ids(token_ids, min(num, 2))) if turn == "forced" else ()


def guessed(token_ids: SequenceOf[int], num: int, is_right: SequenceOf[bool]) -> tuple[int, ...]:
    """Returns `num` tokens after `token_ids`. `is_right`: as in GuessingDrafter."""
    ids = list(token_ids)
    for _ in range(num):
        token_id = next_token(ids)
        ids.append(token_id if is_right[len(ids) % len(is_right)] else (token_id + 1) % VOCAB)
    return tuple(ids[len(token_ids) :])


class GuessingDrafter(Drafter):
    """Drafts that are right at some positions of the sequence and wrong at the others."""

    def __init__(self, is_right: SequenceOf[bool]) -> None:
        """`is_right`: True if the draft is right at a position. The list repeats after its last entry."""
        super().__init__(SpeculationConfig(num_tokens=1, min_ngram=1, max_ngram=1), 0)
        self._is_right = is_right

    def draft(self, token_ids: SequenceOf[int], cost: float, most: int, fit: Fit | None = None) -> tuple[int, ...]:
        found = guessed(token_ids, most, self._is_right)
        return found if fit is None else fit(found, most)


def run_to_end(scheduler: Scheduler, rank: SimulatedRank, max_steps: int = 10_000) -> list[SequenceOutput]:
    """Runs steps until no sequence is left, with as many plans in flight as allowed.

    Checks the integrity after each step.
    """
    outputs: list[SequenceOutput] = []
    in_flight: deque[StepPlan] = deque()
    for _ in range(max_steps):
        plan = scheduler.schedule()
        if plan is not None:
            in_flight.append(plan)
        elif in_flight:
            outputs += scheduler.update(rank.run(in_flight.popleft()))
        else:
            assert not scheduler.has_unfinished, "work left, but nothing was scheduled"
            return outputs
        scheduler.check_integrity()
    raise AssertionError(f"not finished after {max_steps} steps")


def ids_of(outputs: list[SequenceOutput], request_id: str) -> list[int]:
    return [token for output in outputs if output.sequence_id == request_id for token in output.token_ids]


def finish_order(outputs: list[SequenceOutput]) -> list[str]:
    return [output.sequence_id for output in outputs if output.finish_reason]
