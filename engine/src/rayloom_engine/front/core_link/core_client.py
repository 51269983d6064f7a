"""CoreClient: the front's connection to the EngineCore ("core"). Continues unfinished sequences after the core's death.

The client remembers prompt ids, received ids and parameters of every unfinished sequence. When the connection ends, the
client reconnects (it never gives up) and submits these sequences again as resumed ones.

A sampled token depends only on logits, seed and position. A replay adds numbers in another order, so its logits differ
by rounding. In float32 the sequences still continue with the same tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from rayloom_engine.common.process import node_name
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.errors import CorruptLogits, EngineDead, PoisonousRequest, QueueFull, RequestError
from rayloom_engine.front.core_link.recoveries import RecoveryLog, RecoveryRecord
from rayloom_engine.front.core_link.request_mailbox import Mailbox
from rayloom_engine.protocol.framing import core_decoder, frame, read_frame
from rayloom_engine.protocol.logprob_parts import LogprobParts
from rayloom_engine.protocol.messages import (
    Abort,
    CoreStatus,
    Hello,
    Outputs,
    PhaseProgress,
    Refused,
    Submit,
    SubmitChoices,
    Welcome,
)
from rayloom_engine.sampling_params import ContextTooLong

BACKOFF_MIN_S = 0.02
BACKOFF_MAX_S = 0.25  # a core restarts within seconds; a longer wait would lengthen the pause in clients' streams

# msgspec raises these for a value that the wire format cannot hold, such as an integer of more than 64 bits.
_ENCODING_ERRORS = (OverflowError, TypeError, ValueError, msgspec.MsgspecError)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CoreAddress:
    """The address of the core's socket, and the credentials that the front sends there."""

    address: str  # unix:PATH or tcp:HOST:PORT
    token: str = field(repr=False)
    front_id: str = "front"


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
    is_accepted: bool = False  # the client has its 200, so the core must not refuse the sequence for a full queue
    generated_ids: list[int] = field(default_factory=list)
    logprob_parts: LogprobParts = field(default_factory=LogprobParts)


class ProtocolError(Exception):
    """The process at the core's address does not speak this protocol."""


class CoreClient:
    """Sends sequences to the core and puts its outputs into mailboxes. For one event loop.

    Callbacks run after the client's own state is up to date.
    """

    def __init__(
        self,
        core: CoreAddress,
        *,
        on_status: Callable[[CoreStatus], None],
        on_change: Callable[[], None],
        on_recovery: Callable[[RecoveryRecord], None],
    ) -> None:
        """`on_change` is called whenever the connection is made or lost."""
        self._address = core.address
        self._hello = Hello(token=core.token, front_id=core.front_id)
        self._on_status = on_status
        self._on_change = on_change
        self._on_recovery = on_recovery
        self._writer: asyncio.StreamWriter | None = None
        self._sequences: dict[str, ClientSequence] = {}  # sequence id -> unfinished sequence, in order of arrival
        self._was_serving = False
        self.status: CoreStatus | None = None  # the latest from any connection, perhaps of a core that is gone
        self._status_at_s = 0.0
        self.core_pid = 0  # process id of the core on the current connection, or on the last one
        self.is_connected = False
        self.is_core_serving = False  # according to the latest status on the current connection
        self.recoveries = RecoveryLog()

    @property
    def status_age_s(self) -> float:
        """Seconds since `status` arrived. Add them to the ages in `status`: a hung core sends no newer status."""
        return time.monotonic() - self._status_at_s

    def unfinished(self) -> Iterable[ClientSequence]:
        """All unfinished sequences, in order of arrival."""
        return self._sequences.values()

    def num_silent(self, tenant: str | None = None) -> int:
        """Returns the number of sequences without an output so far: those of `tenant`, or (None) of all tenants."""
        return sum(
            not sequence.generated_ids and tenant in (None, sequence.tenant) for sequence in self._sequences.values()
        )

    async def run(self) -> None:
        """Connects, handles messages, and reconnects when the connection ends. Runs until it is cancelled."""
        backoff_s = BACKOFF_MIN_S
        last_problem = ""
        while True:
            try:
                await self._converse()
            except (OSError, EOFError, ValueError, msgspec.MsgspecError, ProtocolError) as error:
                problem = f"{type(error).__name__}: {error}"
                had_connection = self.is_connected
                self._disconnected(problem)
                if had_connection:
                    backoff_s = BACKOFF_MIN_S
                    last_problem = ""
                elif problem != last_problem:
                    # Log a problem once, not at every attempt.
                    logger.info("waiting for the core at %s: %s", self._address, problem)
                    last_problem = problem
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)

    def submit(self, sequences: Sequence[ClientSequence]) -> None:
        """Submits sequences to the core, now or as soon as it is connected. Each mailbox then gets outputs or a
        failure.

        If one of them cannot be encoded, submits none of them and raises RequestError.
        """
        for sequence in sequences:
            # While no core serves, only the front checks the queue. A core that starts later must not refuse a sequence
            # that passed this check.
            sequence.is_accepted = not self.is_core_serving
        data = b"".join(_encoded(choices) for choices in _by_prompt(sequences))
        for sequence in sequences:
            self._sequences[sequence.sequence_id] = sequence
        if self.is_connected:
            self._send(data)

    def abort(self, sequence_id: str) -> None:
        """Forgets a sequence and asks the core to free it. Does nothing if the sequence is finished or unknown."""
        if self._sequences.pop(sequence_id, None) is not None and self.is_connected:
            self._send(frame(Abort(sequence_id)))

    def fail_all(self, error: Exception) -> None:
        """Ends every unfinished sequence with `error`."""
        sequences, self._sequences = list(self._sequences.values()), {}
        for sequence in sequences:
            sequence.mailbox.fail(error)
            if self.is_connected:
                self._send(frame(Abort(sequence.sequence_id)))

    async def _converse(self) -> None:
        reader, writer = await self._open()
        try:
            writer.write(frame(self._hello))
            welcome = core_decoder.decode(await read_frame(reader))
            if not isinstance(welcome, Welcome):
                raise ProtocolError(f"expected Welcome, got {type(welcome).__name__}")
            self._writer = writer
            self._connected(welcome)
            while True:
                self._receive(core_decoder.decode(await read_frame(reader)))
        finally:
            self._writer = None
            writer.transport.abort()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        kind, _, place = self._address.partition(":")
        if kind == "unix":
            return await asyncio.open_unix_connection(place)
        host, _, port = place.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    def _connected(self, welcome: Welcome) -> None:
        # Copy the list before the callback: sequences that the callback submits are already sent, and must not be sent
        # twice.
        before = list(self._sequences.values())
        self.core_pid = welcome.pid
        self.is_connected = True
        self._on_change()
        logger.info("connected to the core, pid %d, epoch %d", welcome.pid, welcome.epoch)
        unfinished = [sequence for sequence in before if sequence.sequence_id in self._sequences]
        if unfinished:
            self._submit_again(unfinished)
            num_requests = len({sequence.request_id for sequence in unfinished})
            self.recoveries.replayed(num_requests)
            logger.info("submitted %d unfinished sequences again", len(unfinished))

    def _submit_again(self, sequences: Sequence[ClientSequence]) -> None:
        """Submits sequences again, marked as accepted, so that the core does not refuse them for a full queue."""
        for choices in _by_prompt(sequences):
            for sequence in choices:
                sequence.is_accepted = True
            try:
                # A sequence's leader (`fork_of`) may be finished. The new core does not know a finished sequence, so
                # such a `fork_of` is left out.
                self._send(_encoded(choices, known=self._sequences))
            except RequestError as error:
                for sequence in choices:
                    logger.error("sequence %s is lost: %s", sequence.sequence_id, error)
                    del self._sequences[sequence.sequence_id]
                    sequence.mailbox.fail(error)

    def _disconnected(self, problem: str) -> None:
        if not self.is_connected:
            return
        self.is_connected = self.is_core_serving = False
        logger.warning("lost the core (%s); %d sequences wait for it", problem, len(self._sequences))
        if self._was_serving:
            self.recoveries.begin("core_lost", "core", node_name(), at=time.time(), now_s=time.monotonic())
        self._on_change()

    def _receive(self, message: object) -> None:
        match message:
            case Outputs():
                self._receive_outputs(message)
            case CoreStatus():
                self.status = message
                self._status_at_s = time.monotonic()
                self.is_core_serving = message.state == "serving"
                if message.state == "recovering" and self.recoveries.open is None:
                    # The core itself is connected and keeps its sequences, so a rank was lost.
                    lost = (message.message, message.lost, message.lost_node)
                    self.recoveries.begin(*lost, at=time.time(), now_s=time.monotonic())
                    self.recoveries.replayed(len({sequence.request_id for sequence in self._sequences.values()}))
                if self.is_core_serving:
                    self._was_serving = True
                    self._end_recovery(message.phases)
                self._on_status(message)
                if message.state == "failed":
                    self.fail_all(EngineDead(f"the engine failed: {message.message}"))
            case Refused():
                self._receive_refusal(message)
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__}")

    def _receive_outputs(self, message: Outputs) -> None:
        for output in message.outputs:
            sequence = self._sequences.get(output.sequence_id)
            if sequence is None:
                continue  # aborted meanwhile
            whole = sequence.logprob_parts.take(output)
            if whole is None:
                continue  # a part of the prompt's logprobs; the client gets all parts with the first token
            sequence.generated_ids.extend(whole.token_ids)
            if whole.finish_reason is not None:
                del self._sequences[whole.sequence_id]
            sequence.mailbox.put(sequence.lane, whole)

    def _receive_refusal(self, message: Refused) -> None:
        sequence = self._sequences.get(message.sequence_id)
        if sequence is None:
            return  # aborted meanwhile
        if message.reason == "queue_full" and sequence.is_accepted:
            self._submit_again([sequence])  # it became accepted only after it was submitted
            return
        del self._sequences[message.sequence_id]
        sequence.mailbox.fail(_refusal(message))

    def _end_recovery(self, phases: tuple[PhaseProgress, ...]) -> None:
        recovery = self.recoveries.end(time.monotonic(), phases)
        if recovery is None:
            return
        logger.info(
            "%s of node %s is back after %.2f s (%s; %s); %d requests continue",
            recovery.process,
            recovery.node,
            recovery.seconds,
            recovery.cause,
            ", ".join(f"{phase.name} {phase.seconds:.2f} s" for phase in recovery.phases),
            recovery.replayed_requests,
        )
        self._on_recovery(recovery)

    def _send(self, data: bytes) -> None:
        assert self._writer is not None
        # drain() is not awaited. The buffer stays small, because the number of accepted requests is limited. If the
        # core is dead, the read loop ends the connection.
        self._writer.write(data)


def _by_prompt(sequences: Iterable[ClientSequence]) -> list[list[ClientSequence]]:
    """Groups neighbouring sequences that have the same prompt and grammar: these are the choices of one request."""
    groups: list[list[ClientSequence]] = []
    for sequence in sequences:
        first = groups[-1][0] if groups else None
        if first is not None and first.prompt_ids is sequence.prompt_ids and _grammar(first) == _grammar(sequence):
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    return groups


def _encoded(choices: list[ClientSequence], known: Collection[str] | None = None) -> bytes:
    """Encodes `choices`, which share a prompt, as one message. Raises RequestError.

    `known`: ids of sequences that the core knows. A `fork_of` that is not among them is left out. None: keep all.
    """
    is_alone = len(choices) == 1
    grammar = choices[0].params.grammar
    submits = [
        Submit(
            sequence_id=sequence.sequence_id,
            prompt_ids=sequence.prompt_ids if is_alone else (),
            params=sequence.params if is_alone else _without_grammar(sequence.params),
            generated_ids=tuple(sequence.generated_ids),
            priority=sequence.priority,
            arrival=sequence.arrival,
            fork_of=sequence.fork_of if known is None or sequence.fork_of in known else None,
            is_resume=sequence.is_accepted,
            tenant=sequence.tenant,
            cache_key=sequence.cache_key,
        )
        for sequence in choices
    ]
    try:
        return frame(submits[0] if is_alone else SubmitChoices(choices[0].prompt_ids, tuple(submits), grammar))
    except _ENCODING_ERRORS as error:
        raise RequestError(f"the request cannot be handed to the engine: {error}") from error


def _grammar(sequence: ClientSequence) -> str:
    return sequence.params.grammar


def _without_grammar(params: DecodingParams) -> DecodingParams:
    return msgspec.structs.replace(params, grammar="") if params.grammar else params


def _refusal(refused: Refused) -> Exception:
    if refused.reason == "queue_full":
        return QueueFull(refused.message, refused.retry_after_s)
    if refused.reason == "poison":
        return PoisonousRequest(refused.message)
    if refused.reason == "corrupt":
        return CorruptLogits(refused.message)
    if refused.reason == "too_long":
        return ContextTooLong(refused.message)
    return RequestError(refused.message)
