"""ClientSequence: an unfinished sequence, with all that another core or engine needs to continue it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.embeds import Embeds, embeds_of
from rayloom_engine.errors import QueueFull, RequestError
from rayloom_engine.front.core_link.prompt_blocks import PromptBlocks, prompt_blocks
from rayloom_engine.front.core_link.request_mailbox import Mailbox
from rayloom_engine.protocol.fingerprint import Fingerprint
from rayloom_engine.protocol.framing import frame
from rayloom_engine.protocol.logprob_parts import LogprobParts
from rayloom_engine.protocol.messages import Refused, Submit, SubmitChoices
from rayloom_engine.routing.fairness import HeldRequest, in_turns

# msgspec raises these for a value that the wire format cannot hold, such as an integer of more than 64 bits.
_ENCODING_ERRORS = (OverflowError, TypeError, ValueError, msgspec.MsgspecError)


@dataclass(slots=True, kw_only=True)
class ClientSequence:
    """An unfinished sequence and the token ids received so far."""

    sequence_id: str
    request_id: str
    lane: int  # index of the sequence within its request
    mailbox: Mailbox
    prompt_ids: tuple[int, ...]
    params: DecodingParams
    priority: int
    arrival: float  # Unix time of acceptance
    fork_of: str | None = None
    tenant: str = ""  # the tenant whose share of slots and queue places the sequence uses
    cache_key: bytes = b""  # only sequences with equal keys share cached prefixes
    is_accepted: bool = False  # the front has accepted the request, so the core must not refuse it for a full queue
    generated_ids: list[int] = field(default_factory=list)
    logprob_parts: LogprobParts = field(default_factory=LogprobParts)
    place: Place = field(default_factory=lambda: Place())
    # None until the router has to choose between engines; all choices of a request share the blocks
    prompt_blocks: PromptBlocks | None = None

    @property
    def embeds(self) -> Embeds | None:
        """The embeddings of the prompt; None for a prompt of token ids."""
        return embeds_of(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.generated_ids)

    @property
    def most_tokens(self) -> int:
        """The most tokens of prompt and output together, which must fit into the context of an engine."""
        return len(self.prompt_ids) + self.params.max_tokens

    def held_s(self, now_s: float) -> float:
        """Returns the seconds for which no engine had the sequence before its first token. `now_s`: time.monotonic."""
        since_s = None if self.generated_ids else self.place.waits_since_s
        return self.place.held_s + (0.0 if since_s is None else now_s - since_s)

    def blocks(self, block_size: int) -> PromptBlocks:
        """Returns the blocks of the prompt, cached for one block size. `block_size`: tokens in a block; 0: unknown."""
        if self.prompt_blocks is None or self.prompt_blocks.block_size != block_size:
            self.prompt_blocks = prompt_blocks(
                self.prompt_ids,
                block_size,
                keys=(self.cache_key, self.params.adapter_digest),
                otherwise=self.request_id.encode(),
                is_shared=self.params.prompt_logprobs is None,
            )
        return self.prompt_blocks


@dataclass(slots=True)
class Place:
    """The engine that computes a sequence, and the earlier engines and waits of the sequence."""

    engine: str | None = None  # name of the engine; None: the sequence waits for an engine
    attempt: int = 0  # only outputs with this number are used
    is_decoding: bool = False  # the engine has sent an output of this attempt
    # The fingerprint of the last engine that got the sequence. Before an engine gets the sequence, this is the
    # fingerprint of the model whose tokenizer was used.
    fingerprint: Fingerprint | None = None
    is_rounded: bool = False  # engines whose logits differ by rounding have computed parts of the sequence
    waits_since_s: float | None = None  # time.monotonic at which the sequence began to wait for an engine
    held_s: float = 0.0  # seconds of earlier waits for an engine, before the first token
    refused_by: set[str] = field(default_factory=set)  # names of engines whose queue was full
    # name of an engine whose logits were not finite -> its fingerprint
    corrupt_by: dict[str, Fingerprint | None] = field(default_factory=dict)
    # name of an engine that could not load the adapter -> the cause, in words
    no_adapter_on: dict[str, str] = field(default_factory=dict)
    # number of engines that were lost in a row while they had this sequence, without a token in between
    num_losses: int = 0
    last_engine: str = ""
    last_loss_s: float = 0.0

    def note_refusal(self, refused: Refused, engine: str, fingerprint: Fingerprint | None) -> None:
        """Records a message of the engine `engine`, so that `can_compute` does not choose this engine."""
        if refused.reason == "queue_full":
            self.refused_by.add(engine)
        elif refused.reason == "corrupt":
            self.corrupt_by[engine] = fingerprint
        elif refused.reason == "adapter":
            self.no_adapter_on[engine] = refused.message

    def allows_as(self, other: Place) -> bool:
        """True if `can_compute` and `unlike_corrupt` choose between the same engines for sequences at both places."""
        return (
            self.refused_by == other.refused_by
            and self.corrupt_by == other.corrupt_by
            and self.no_adapter_on.keys() == other.no_adapter_on.keys()
            and self.num_losses == other.num_losses
            and self.last_engine == other.last_engine
        )

    def leave(self) -> None:
        """Records that no engine computes the sequence any more. Outputs that are still on their way are not used."""
        self.last_engine = self.engine or self.last_engine
        self.engine = None
        self.attempt += 1
        self.is_decoding = False


def by_prompt(sequences: Iterable[ClientSequence]) -> list[list[ClientSequence]]:
    """Groups neighbouring sequences that have the same prompt and grammar: these are the choices of one request.

    All sequences of a group may be given to the same engines. So a choice that an engine has refused is in another
    group than the other choices of its request.
    """
    groups: list[list[ClientSequence]] = []
    for sequence in sequences:
        first = groups[-1][0] if groups else None
        if first is not None and _is_like(first, sequence) and first.place.allows_as(sequence.place):
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    return groups


def in_turns_of_keys(waiting: list[ClientSequence], all_unfinished: Iterable[ClientSequence]) -> list[ClientSequence]:
    """Returns waiting sequences in the order in which engines should get them: API keys take turns.

    Sequences of one request stay together. Sequences in `all_unfinished` that already have an engine count, too: a key
    with more such sequences gets a later turn.
    """
    by_request: dict[str, list[ClientSequence]] = {}
    for sequence in waiting:
        by_request.setdefault(sequence.request_id, []).append(sequence)
    held = [
        HeldRequest(request_id=name, tenant=choices[0].tenant, arrival=choices[0].arrival)
        for name, choices in by_request.items()
    ]
    num_placed = Counter(sequence.tenant for sequence in all_unfinished if sequence.place.engine is not None)
    return [sequence for request in in_turns(held, num_placed) for sequence in by_request[request.request_id]]


def check_held(held: list[ClientSequence], new: list[ClientSequence], most: float, max_tokens: float) -> None:
    """Raises QueueFull if the sequences that wait for an engine, `held` and `new` together, exceed a limit.

    `most`, `max_tokens`: limits for the number and for the tokens of these sequences. `new`: at least one sequence, all
    of one request, whose tenant gets at most half of the places.
    """
    if len(held) + len(new) > most:
        raise QueueFull(f"no engine can take the request, and {len(held)} sequences wait for one; try again", 1)
    num_others = len(new) - 1  # the last of them is checked as if the others were held already
    tenant = new[0].tenant
    num_own = sum(sequence.tenant == tenant for sequence in held)
    # The rule of `has_room`, which `check_room` applies only while no engine serves. An engine may serve although no
    # engine can take this request, for example if its adapter or its length needs another engine.
    if tenant and num_own + num_others >= most - len(held) - num_others:
        raise QueueFull(
            f"no engine can take the request, {num_own} sequences of this API key wait for one, and the other places "
            "are kept for other keys; try again",
            1,
        )
    num_held_tokens = sum(sequence.num_tokens for sequence in held)
    if num_held_tokens + sum(sequence.num_tokens for sequence in new) > max_tokens:
        raise QueueFull(
            f"no engine can take the request, and requests with {num_held_tokens} tokens wait for one; try again", 1
        )


def encoded(choices: list[ClientSequence], known: Collection[str] | None = None) -> bytes:
    """Encodes `choices`, which share a prompt, as one message. Raises RequestError.

    `known`: ids of sequences that the core knows; a `fork_of` that is not in `known` is left out. None: all are known.
    """
    is_alone = len(choices) == 1
    grammar = choices[0].params.grammar
    prompt_ids = choices[0].prompt_ids
    embeds = choices[0].embeds
    submits = [
        Submit(
            sequence_id=sequence.sequence_id,
            prompt_ids=sequence.prompt_ids if is_alone else (),
            params=sequence.params if is_alone else _without_grammar(sequence.params),
            generated_ids=tuple(sequence.generated_ids),
            priority=sequence.priority,
            arrival=sequence.arrival,
            fork_of=sequence.fork_of if known is None or sequence.fork_of in known else None,
            is_further_choice=sequence.fork_of is not None,
            is_resume=sequence.is_accepted,
            tenant=sequence.tenant,
            cache_key=sequence.cache_key,
            attempt=sequence.place.attempt,
            embeds=sequence.embeds if is_alone else None,
        )
        for sequence in choices
    ]
    try:
        return frame(submits[0] if is_alone else SubmitChoices(prompt_ids, tuple(submits), grammar, embeds))
    except _ENCODING_ERRORS as error:
        raise RequestError(f"the request cannot be handed to the engine: {error}") from error


def num_requests(sequences: Iterable[ClientSequence]) -> int:
    """Returns the number of requests that the sequences belong to."""
    return len({sequence.request_id for sequence in sequences})


def _is_like(one: ClientSequence, other: ClientSequence) -> bool:
    return one.prompt_ids is other.prompt_ids and one.params.grammar == other.params.grammar


def _without_grammar(params: DecodingParams) -> DecodingParams:
    return msgspec.structs.replace(params, grammar="") if params.grammar else params
