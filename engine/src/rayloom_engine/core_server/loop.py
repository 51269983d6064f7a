"""The EngineCore's main loop: handles messages of API server processes ("fronts"), runs steps, and sends outputs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec

from rayloom_engine.core.embeds import check_embeds
from rayloom_engine.core.engine import Engine
from rayloom_engine.core.host_tier import HostTier
from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.core.probe import is_probe
from rayloom_engine.core.sequence import BROKEN_ADAPTER, BROKEN_FORM, CORRUPT, Origin, Sequence
from rayloom_engine.core_server.black_box import BlackBox
from rayloom_engine.core_server.cache_publisher import CachePublisher
from rayloom_engine.core_server.gateway_counter import GatewayCounter
from rayloom_engine.core_server.ranks.stillness import patience_s
from rayloom_engine.core_server.sockets import CoreIo, GatewayConnected, Inbox, InboxMessage
from rayloom_engine.core_server.state import CoreState
from rayloom_engine.errors import CORRUPT_LOGITS, QueueFull, RequestError
from rayloom_engine.protocol.messages import Abort, Outputs, Refused, ServedModel, Submit, WantCache
from rayloom_engine.sampling_params import check_token_ids

_PROBE_SECONDS = 10.0  # seconds between probes of an idle engine
_IDLE_CHECK_SECONDS = 0.25  # seconds between checks of an idle engine's ranks
_POISON = (
    "the engine died every time that it computed this request, at last with no other request in the step; "
    "the request is ended so that others go on"
)


class Core:
    """Turns messages of fronts into sequences, and step outputs into messages to fronts."""

    def __init__(
        self,
        engine: Engine,
        model: ServedModel,
        io: CoreIo,
        state: CoreState,
        box: BlackBox,
        check_ranks: Callable[[], None] = lambda: None,
    ) -> None:
        """`check_ranks`: raises RankLost if a rank is lost.

        Called while the engine is idle, because no step then notices the loss of a rank.
        """
        self.model = model
        self._engine = engine
        self._box = box
        engine.before_run = self._note
        self._check_ranks = check_ranks
        self._io = io
        self._state = state
        self._publisher = CachePublisher(engine, io, secrets.randbits(63))
        self._gateways = GatewayCounter()
        self._is_note_old = False  # True if the black box still shows a plan that has ended

    def begin_epoch(self, epoch: int) -> None:
        """Marks all further plans with `epoch`. The ranks must be ready for this epoch."""
        self._engine.scheduler.epoch = epoch
        self._state.epoch = epoch

    @property
    def host_tier(self) -> HostTier | None:
        """The copies of KV blocks in host memory; None if there are none."""
        return self._engine.scheduler.pool.tier

    def forget_ranks(self) -> None:
        """Resets the scheduler after ranks lost slots and KV cache. Every sequence keeps its ids and waits again."""
        self._engine.scheduler.forget_ranks()

    def run(self, inbox: Inbox, began: Callable[[], None]) -> NoReturn:
        """Serves until the process ends. Calls `began` after the first step.

        Raises RankLost. Call `run` again once the ranks are rebuilt: it continues with the same sequences.
        """
        has_begun = False
        self._end_condemned()
        for sequence in self._engine.scheduler.unfinished():
            self._end_drafts_after_death(sequence)
        self._engine.add_probe()  # The probe passes a token through every rank before the state becomes "serving".
        idle_since = time.monotonic()
        while True:
            messages = inbox.take()
            if messages:
                self._renew_note()  # A message may crash this process. A crash must not be blamed on the last step.
            for connection, message in messages:
                self._handle(connection, message)
            if messages and not (self._state.stats.num_running or self._state.stats.num_waiting):
                # The first step after an idle time may be long, so the status is renewed before this step. Otherwise
                # the operator might delete the engine during the step, because the last status showed no requests.
                self._publish()
            self._state.heartbeat = time.monotonic()
            # The load is published after the inbox is read and before the step. So the load includes the sequences that
            # arrived during the last step. A front adds its new sequences to the last load, and stops doing so at the
            # next load.
            self._publisher.publish(self._state.heartbeat)
            if self._engine.has_unfinished:
                self._state.rank_phase = "step"
                self._hold_trial()
                outputs = self._engine.step()
                self._end_step()
                if not has_begun:
                    has_begun = True
                    # called before `began`, so that a status with "serving" also has the time of a first token
                    self._publish()
                    began()
                self._send(outputs)
                self._publish()
                idle_since = time.monotonic()
                continue
            self._renew_note()
            self._state.rank_phase = "idle"
            self._publish()
            self._check_ranks()
            probe_in_s = max(0.0, idle_since + _PROBE_SECONDS - time.monotonic())
            has_mail = inbox.wait(probe_in_s, at_most=_IDLE_CHECK_SECONDS)
            if not has_mail and time.monotonic() - idle_since >= _PROBE_SECONDS:
                self._engine.add_probe()

    def _handle(self, connection: int, message: InboxMessage) -> None:
        if isinstance(message, Submit):
            self._submit(connection, message)
        elif isinstance(message, WantCache):
            self._publisher.subscribe(connection)
        elif isinstance(message, Abort):
            self._abort(_request_id(connection, message.attempt, message.sequence_id), is_complete=message.is_complete)
            if not message.is_moved:
                self._clear(message.sequence_id)
        elif isinstance(message, GatewayConnected):
            self._gateways.connected(connection)
        else:
            self._publisher.unsubscribe(connection)
            self._gateways.disconnected(connection)
            # The suspects stay: the front will submit its sequences again, and one of these sequences may even have
            # crashed the front.
            prefix = f"{connection}."
            for sequence in list(self._engine.scheduler.unfinished()):
                if sequence.request_id.startswith(prefix):
                    self._engine.abort(sequence.request_id)

    def _abort(self, request_id: str, *, is_complete: bool) -> None:
        if is_complete:
            self._gateways.complete(request_id)
        else:
            self._gateways.forget(request_id)
        self._engine.abort(request_id)

    def _clear(self, sequence_id: str) -> None:
        """Removes a sequence that has ended from the suspects.

        Do not call it for sequences of a disconnected front or for moved sequences: they may be submitted again.
        """
        if self._box.suspicion.suspects.pop(sequence_id, None) is not None:
            self._box.save()

    def _hold_trial(self) -> None:
        """While there are suspects, restricts the scheduler: first to a probe, then to the suspects of a trial.

        The probe comes first. If the ranks die with every plan, they die with the probe, and no suspect is blamed.
        """
        suspicion = self._box.suspicion
        scheduler = self._engine.scheduler
        if not suspicion.suspects:
            scheduler.restrict(None)
            return
        num_suspects = len(suspicion.suspects)
        unfinished = sorted(scheduler.unfinished(), key=lambda sequence: -sequence.num_generated)
        in_flight = scheduler.in_flight()
        computed = {
            _sequence_id(s.request_id): in_flight[s][0] if s in in_flight else s.num_computed
            for s in unfinished
            if not is_probe(s.request_id)
        }
        trial = suspicion.trial(computed)
        if len(suspicion.suspects) != num_suspects:
            self._box.save()
        probes = {s.request_id for s in unfinished if is_probe(s.request_id)}
        only = probes or {s.request_id for s in unfinished if _sequence_id(s.request_id) in trial}
        scheduler.restrict(frozenset(only) if trial else None)

    def _note(self) -> None:
        """Records the positions in flight in the black box, and sets `patience_s` for these plans.

        Publishes the number of running sequences if a plan has changed it, because the plan's step may be long. A probe
        alone is no request, and would show an idle engine as busy. A sequence that waits for its grammar counts as in
        flight, because the rank builds the grammar meanwhile.
        """
        scheduler = self._engine.scheduler
        in_flight = {**scheduler.waiting_for_forms(), **scheduler.in_flight()}
        spans = {_sequence_id(s.request_id): span for s, span in in_flight.items() if not is_probe(s.request_id)}
        self._box.note(spans)
        self._is_note_old = False
        state = self._state
        forecast_s = self._engine.forecast.layer_s
        state.set_patience(patience_s(state.hang_seconds, forecast_s, is_trial=self._box.is_trial))
        if spans and scheduler.num_running != state.stats.num_running:
            self._publish()

    def _end_step(self) -> None:
        """Records the positions in flight after a step, or notes that the record of the ended plan is old.

        The positions are recorded in three cases: in a trial, at a depth above 1, or if the step had no plan. Otherwise
        the record of the ended plan stays until the next plan is recorded, a message arrives, or the engine is idle.
        """
        is_planless = self._is_note_old  # The step has not recorded a plan.
        if is_planless or self._box.is_trial or self._engine.scheduler.config.depth > 1:
            self._note()
        else:
            self._is_note_old = True

    def _renew_note(self) -> None:
        """Records that nothing is in flight, if the black box still has the record of an ended plan."""
        if self._is_note_old:
            self._note()

    def _end_condemned(self) -> None:
        for sequence in list(self._engine.scheduler.unfinished()):
            source, _, sequence_id = sequence.request_id.partition("/")
            if sequence_id in self._box.suspicion.condemned:
                self._engine.abort(sequence.request_id)
                self._gateways.failed(sequence.request_id)
                self._refuse(source, sequence_id, "poison", _POISON)

    def _end_drafts_after_death(self, sequence: Sequence) -> None:
        """Ends the drafts of a sequence that was in flight at a death.

        Some sequences crash the process only with drafts, for example because llguidance fails when it follows a draft.
        A trial has no drafts, so each trial would clear such a sequence.
        """
        if self._box.suspicion.may_have_caused_death(_sequence_id(sequence.request_id)):
            sequence.params = msgspec.structs.replace(sequence.params, speculation=False)

    def _refuse(self, source: str, sequence_id: str, reason: str, message: str, retry_after_s: int = 1) -> None:
        connection, attempt = _parsed(source)
        refused = Refused(
            sequence_id=sequence_id, reason=reason, message=message, retry_after_s=retry_after_s, attempt=attempt
        )
        self._io.send(connection, refused)

    def _submit(self, connection: int, submit: Submit) -> None:
        source = _source(connection, submit.attempt)
        request_id = _request_id(connection, submit.attempt, submit.sequence_id)
        has_adapter = self._state.has_reported(submit.params.adapter)
        self._gateways.submitted(connection, request_id, submit, has_adapter=has_adapter)
        if submit.sequence_id in self._box.suspicion.condemned:
            self._gateways.failed(request_id)
            self._refuse(source, submit.sequence_id, "poison", _POISON)
            return
        try:
            check_embeds(submit.embeds, self.model.hidden_size)
            sequence = self._sequence(connection, request_id, submit)
            check_token_ids(sequence.token_ids, self.model.vocab_size)
            output = self._engine.add(sequence, submit.is_resume)
        except QueueFull as error:
            self._gateways.forget(request_id)
            self._refuse(source, submit.sequence_id, "queue_full", str(error), error.retry_after_s)
        except RequestError as error:
            self._gateways.forget(request_id)
            num_tokens = len(submit.prompt_ids) + len(submit.generated_ids)
            is_too_long = num_tokens >= self._engine.scheduler.config.max_model_len
            reason = "too_long" if is_too_long else "invalid"
            self._refuse(source, submit.sequence_id, reason, str(error))
        else:
            if output is not None:
                self._send([output])

    def _sequence(self, connection: int, request_id: str, submit: Submit) -> Sequence:
        """Returns the sequence that a Submit describes. Its embeddings were checked."""
        sequence = Sequence(
            request_id=request_id,
            prompt_ids=submit.prompt(),
            generated_ids=submit.generated_ids,
            params=submit.params,
            eos_token_ids=self.model.eos_token_ids,
            # The choices of a request are submitted together. If the leader has another attempt number, it is not
            # found. The prompt is then shared through the prefix cache.
            fork_of=None if submit.fork_of is None else _request_id(connection, submit.attempt, submit.fork_of),
            origin=Origin(
                priority=submit.priority,
                arrival=submit.arrival,
                tenant=submit.tenant,
                cache_key=submit.cache_key,
            ),
        )
        self._end_drafts_after_death(sequence)
        return sequence

    def _send(self, outputs: list[SequenceOutput]) -> None:
        """Sends each front the outputs of its sequences, with the front's own sequence ids."""
        self._gateways.observe(outputs)
        by_connection: dict[int, list[SequenceOutput]] = {}
        sources: dict[str, tuple[int, int]] = {}
        if any(output.finish_reason == CORRUPT for output in outputs):
            self._engine.add_probe()  # A rank that computes a NaN even for the probe exits.
        for output in outputs:
            source, _, sequence_id = output.sequence_id.partition("/")
            if output.finish_reason is not None:
                self._clear(sequence_id)
            if output.finish_reason == CORRUPT:
                self._refuse(source, sequence_id, "corrupt", CORRUPT_LOGITS)
                continue
            if output.finish_reason == BROKEN_FORM:
                self._refuse(source, sequence_id, "invalid", output.message)
                continue
            if output.finish_reason == BROKEN_ADAPTER:
                self._refuse(source, sequence_id, "adapter", output.message)
                continue
            if source not in sources:
                sources[source] = _parsed(source)
            connection, attempt = sources[source]
            renamed = msgspec.structs.replace(output, sequence_id=sequence_id, attempt=attempt)
            by_connection.setdefault(connection, []).append(renamed)
        for number, items in by_connection.items():
            self._io.send(number, Outputs(tuple(items)))

    def _publish(self) -> None:
        self._state.stats = self._engine.stats()
        self._state.gateway_requests = self._gateways.report()
        self._state.last_token_at = self._engine.last_token_at
        self._state.heartbeat = time.monotonic()


def _source(connection: int, attempt: int) -> str:
    return f"{connection}.{attempt}"


def _parsed(source: str) -> tuple[int, int]:
    """Returns (connection, attempt) of a source."""
    connection, _, attempt = source.partition(".")
    return int(connection), int(attempt)


def _request_id(connection: int, attempt: int, sequence_id: str) -> str:
    """The scheduler's name of a sequence: connection and attempt (its source), and the id.

    The name contains the attempt. So outputs and Aborts of an earlier attempt on the same connection have no effect on
    a later attempt.
    """
    return f"{_source(connection, attempt)}/{sequence_id}"


def _sequence_id(request_id: str) -> str:
    """The front's name of a sequence. It is random, so no two sequences have the same name, even after a restart."""
    return request_id.partition("/")[2]
