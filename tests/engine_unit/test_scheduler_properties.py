"""Random histories of the scheduler: after every step the properties below hold.

The histories have arrivals of one or several tenants, forks, aborts, too few blocks and losses of ranks. They have one
plan or several plans in flight, with and without placeholders.

- nothing leaks: at the end every block and slot is free
- nothing starves: every request that is not aborted finishes, with exactly the ids that it would get alone
- the token budget and the number of sequences are never exceeded
- prefix hits are never wrong: the simulated rank refuses to read KV that was computed from other ids, or with another
  cache key
- a prompt with a token that gives NaN ends as corrupt, and no other sequence computes with a NaN, also if lost ranks
  keep their memory
- logprobs of a prompt are complete, and each is reported once
- a sequence whose grammar is not built yet delays no other sequence, and gets its tokens afterwards
- drafts change no token and leave nothing behind, whether they are right or wrong, also if their KV is NaN, or if the
  masks of their sequence are late. They come from a drafter in the core, or from a draft model on the rank, whatever
  drafts cost, and if the draft model does not answer or lags behind
- copies in host memory are loaded only if they are whole, also if the ranks die while they store them
- a block that a later token sees is never released, and with a window no sequence holds more blocks than it needs
"""

from __future__ import annotations

from collections import deque

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.sequence import CORRUPT
from rayloom_engine.core.speculation.drafter import SpeculationConfig
from rayloom_engine.core.step_seconds import StepSeconds
from rayloom_engine.core.window import most_blocks
from rt_histories import ARRIVALS, DRAFT_COSTS, THINKING, history, simple_arrival
from rt_scheduler import (
    BLOCK_SIZE,
    GuessedGrammars,
    GuessingDrafter,
    SimulatedRank,
    expected_ids,
    ids_of,
    make_scheduler,
    make_sequence,
)


# A resumed fork names a slot, and the same plan appends blocks to this slot. Ranks add the fork before they know these
# blocks.
@example(
    **history(
        arrivals=[simple_arrival((0, 0), 8, 0, num_forks=2)],
        num_blocks=9,
        budget=10,
        max_num_seqs=3,
        depth=2,
        window=1,
        losses={29},
    )
)
# The sequence whose turn it is finds no free block, so a sequence is preempted. The plan is still empty. Then the other
# sequences must compute.
@example(
    **history(
        arrivals=[
            simple_arrival((0,), 7, 1),
            simple_arrival((0,) * 4, 6, 1),
            simple_arrival((0,) * 11, 10, 0, num_generated=1),
        ],
        num_blocks=9,
        budget=4,
        max_num_seqs=3,
        depth=3,
        collects=[True],
    )
)
# Choices of a request with a sliding window are resumed one after the other. Each names the slot of the choice before
# it for its prompt and the first entries of its block table. Entries before the window differ between these choices.
@example(
    **history(
        arrivals=[
            simple_arrival((0,), 1, 0, num_forks=2),
            simple_arrival((0,) * 5, 8, 5, num_forks=2, num_generated=2, build_steps=1),
        ],
        num_blocks=9,
        budget=13,
        max_num_seqs=3,
        depth=3,
        window=2,
        collects=[True],
        trials=[None, 3, None, 2, None, 2, None],
    )
)
# A sequence with a sliding window is postponed because its mask is missing. It must keep the blocks that its newest
# token sees.
@example(
    **history(
        arrivals=[simple_arrival((0,) * 20, 1, 0, build_steps=8)],
        num_blocks=9,
        budget=3,
        max_num_seqs=1,
        window=4,
    )
)
# A result names a slot whose mask is not ready. The slot's sequence was not postponed, because there is no block for
# its token.
@example(
    **history(
        arrivals=[simple_arrival((0, 0), 4, 0, num_generated=3, build_steps=6)],
        num_blocks=9,
        budget=2,
        max_num_seqs=1,
        losses={6},
    )
)
# With a sliding window, a proposal takes a block beyond those of the step.
@example(
    **history(
        arrivals=[simple_arrival((0,) * 13, 10, 0, build_steps=1)],
        num_blocks=9,
        budget=3,
        max_num_seqs=1,
        window=2,
        guesses=[True],
        num_guesses=6,
    )
)
# A sequence loads its own copy, which it has not proven. The pool has a block of the same content that another sequence
# has not proven either. The loaded block replaces this block.
@example(
    **history(
        arrivals=[
            simple_arrival((0,), 1, 0, build_steps=2),
            simple_arrival((0,) * 5, 1, 0, num_forks=1, build_steps=2),
        ],
        num_blocks=9,
        budget=6,
        max_num_seqs=2,
        trials=[None, None, 2, 1],
        num_kept=1,
        num_host_slots=1,
        keeps_host_memory=False,
    )
)
@settings(max_examples=400, deadline=None, print_blob=True)
@given(
    arrivals=ARRIVALS,
    num_blocks=st.integers(9, 24),
    budget=st.integers(1, 20),
    max_num_seqs=st.integers(1, 5),
    depth=st.integers(1, 3),
    num_ahead=st.integers(0, 2),
    window=st.one_of(st.none(), st.integers(1, 12)),
    collects=st.lists(st.booleans(), min_size=1, max_size=12),
    trials=st.lists(st.one_of(st.none(), st.integers(1, 4)), min_size=1, max_size=12),
    losses=st.sets(st.integers(1, 40), max_size=3),
    keeps_memory=st.booleans(),
    token_s=st.one_of(st.none(), st.sampled_from((0.01, 0.1, 10.0))),
    num_kept=st.one_of(st.none(), st.integers(1, 8)),
    guesses=st.one_of(st.none(), st.lists(st.integers(0, 3).map(bool), min_size=1, max_size=7)),
    num_guesses=st.integers(1, 9),
    late_masks=st.booleans(),
    draft_costs=st.one_of(st.none(), st.sampled_from(DRAFT_COSTS)),
    withholds=st.booleans(),
    num_host_slots=st.sampled_from((0, 0, 1, 3, 8, 64)),
    keeps_host_memory=st.booleans(),
)
def test_every_history_ends_with_the_right_tokens_and_empty_books(
    arrivals,
    num_blocks,
    budget,
    max_num_seqs,
    depth,
    num_ahead,
    window,
    collects,
    trials,
    losses,
    keeps_memory,
    token_s,
    num_kept,
    guesses,
    num_guesses,
    late_masks,
    draft_costs,
    withholds,
    num_host_slots,
    keeps_host_memory,
) -> None:
    sizes = {"max_num_batched_tokens": budget, "max_num_seqs": max_num_seqs, "depth": depth, "window": window}
    sizes["num_kept_blocks"] = num_kept
    sizes["num_host_slots"] = num_host_slots
    sizes["num_ahead"] = 0 if guesses else min(num_ahead, depth - 1)
    has_draft_model = num_guesses % 3 == 0
    if guesses:  # True: the draft token at this position is right
        sizes["speculation"] = SpeculationConfig(
            num_tokens=num_guesses, min_ngram=1, max_ngram=1, has_draft_model=has_draft_model
        )
        sizes["make_drafter"] = None if has_draft_model else lambda: GuessingDrafter(guesses)
        sizes["grammars"] = GuessedGrammars()
    scheduler = make_scheduler(num_blocks, **sizes)
    # A sequence has blocks for one step. The proposals of a draft model may take free blocks for the next step, too.
    most_steps = 2 if guesses and has_draft_model else 1
    # `token_s`: seconds for a prompt's token, where a decode takes 1 s. None: costs are unknown, so
    # no step has a limit of time.
    draft_token_s, pass_s, draft_prompt_s = draft_costs or (None, None, None)
    costs = None
    if token_s is not None:
        costs = StepSeconds(
            decode_only=((1, 1.0),),
            token_s=token_s,
            pair_s=token_s / 10,
            draft_token_s=draft_token_s,
            passes=() if pass_s is None else ((1, pass_s),),
            draft_prompt_s=draft_prompt_s,
        )
    in_flight = deque()
    keys: dict[str, bytes] = {}
    build_steps: dict[str, int] = {}
    rank = SimulatedRank(
        window=window,
        keys=keys,
        build_steps=build_steps,
        nan_in_drafts=num_guesses % 2 == 0,
        late_masks=late_masks,
        guesses=guesses if guesses and has_draft_model else (),
        withholds=withholds,
    )
    outputs = []
    prompts: dict[str, tuple[int, ...]] = {}  # prompts of the requests that want logprobs
    poisoned: set[str] = set()
    expected: dict[str, list[int]] = {}
    aborts: dict[str, int] = {}
    aborted: set[str] = set()
    step = 0
    while scheduler.has_unfinished or step <= 12:
        for number, arrival in enumerate(arrivals):
            if arrival.at_step == step:
                num = min(arrival.num_generated, arrival.max_tokens - 1)
                prompt = arrival.prompt_ids()
                following = expected_ids(prompt, arrival.max_tokens)
                leader = f"{number}"
                for index in range(1 + arrival.num_forks):
                    request_id = leader if index == 0 else f"{leader}.{index}"
                    expected[request_id] = following[num:]
                    keys[request_id] = arrival.tenant.encode() + b"|" + arrival.salt
                    if arrival.poison_at is not None:
                        poisoned.add(request_id)
                        expected[request_id] = []
                    elif arrival.has_prompt_logprobs and num == 0:
                        prompts[request_id] = prompt
                    params = DecodingParams(
                        max_tokens=arrival.max_tokens,
                        temperature=0.0,
                        prompt_logprobs=0 if arrival.has_prompt_logprobs else None,
                        grammar="start: /.*/" if arrival.build_steps % 2 else "",
                        thinking=THINKING if arrival.build_steps and arrival.build_steps % 2 == 0 else None,
                    )
                    build_steps[request_id] = arrival.build_steps
                    scheduler.add(
                        make_sequence(
                            request_id,
                            prompt,
                            params=params,
                            tenant=arrival.tenant,
                            cache_key=keys[request_id],
                            priority=arrival.priority,
                            arrival=float(step),
                            generated_ids=following[:num],
                            fork_of=leader if index else None,
                        )
                    )
                if arrival.abort_after is not None:
                    aborts[leader] = step + arrival.abort_after
        for request_id, at_step in aborts.items():
            if at_step == step and scheduler.abort(request_id):
                aborted.add(request_id)
        if step in losses:
            scheduler.forget_ranks()
            rank.forget_all(keeps_memory)
            for plan in in_flight:
                rank.tear(plan)
            in_flight.clear()
            if num_host_slots and not keeps_host_memory:
                rank.lose_host_memory()
                scheduler.pool.tier.begin_epoch((f"memory {step}",))
        scheduler.check_integrity()
        every = trials[step % len(trials)] if step < 60 else None  # only some sequences are computed, as in a trial
        unfinished = [sequence.request_id for sequence in scheduler.unfinished()]
        scheduler.restrict(None if every is None else frozenset(unfinished[::every]))
        may_collect = collects[step % len(collects)] and in_flight
        plan = None if may_collect else scheduler.schedule(costs)
        if plan is not None:
            assert plan.num_tokens <= budget
            assert len(plan.slots) <= max_num_seqs
            assert len({slot.slot for slot in plan.slots}) == len(plan.slots)
            in_flight.append(plan)
            assert len(in_flight) <= depth
        elif in_flight:
            outputs += scheduler.update(rank.run(in_flight.popleft()))
        else:
            assert every or not scheduler.has_unfinished, "work left, but nothing was scheduled"
        scheduler.check_integrity()
        for sequence in scheduler.unfinished():
            # with guesses: a draft, and the proposal of the next draft
            num_tokens = sequence.num_tokens + (2 * num_guesses if guesses else scheduler.config.num_ahead)
            assert len(sequence.held_block_ids) <= most_blocks(num_tokens, window, budget * most_steps, BLOCK_SIZE)
        step += 1
        assert step < 6000, "starved"
    for request_id, ids in expected.items():
        got = ids_of(outputs, request_id)
        assert got == (ids[: len(got)] if request_id in aborted else ids)
    assert scheduler.pool.num_free == num_blocks
    reasons = {output.sequence_id: output.finish_reason for output in outputs if output.finish_reason}
    assert set(reasons) == set(expected) - aborted
    assert {name for name, reason in reasons.items() if reason == CORRUPT} == poisoned - aborted
    for request_id, prompt in prompts.items():
        if ids_of(outputs, request_id):
            entries = [e for output in outputs if output.sequence_id == request_id for e in output.prompt_logprobs]
            assert [(e.token_id, e.logprob) for e in entries] == [
                (token_id, -float(place)) for place, token_id in enumerate(prompt) if place
            ]
