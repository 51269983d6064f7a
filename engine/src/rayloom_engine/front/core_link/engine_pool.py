"""EnginePool: the links to a front's engines, and the placing of sequences on them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from rayloom_engine.common.json_words import shown
from rayloom_engine.core.embeds import FIELD
from rayloom_engine.errors import AdapterFailed, EngineDead
from rayloom_engine.front.core_link.adapter_choice import adapt, is_unloaded, may_load, with_adapter
from rayloom_engine.front.core_link.engine_choice import (
    PoolRules,
    can_compute,
    chosen_engine,
    is_usable,
    unlike_corrupt,
)
from rayloom_engine.front.core_link.engine_link import EngineLink, LinkListener
from rayloom_engine.front.core_link.handshake import CoreAddress
from rayloom_engine.front.core_link.sequences import ClientSequence
from rayloom_engine.protocol.fingerprint import Fingerprint, continuation, differences
from rayloom_engine.protocol.framing import frame
from rayloom_engine.protocol.messages import Abort

logger = logging.getLogger(__name__)


class EnginePool:
    """All engines by name, in the order in which they were added. For one event loop."""

    def __init__(self, cores: Mapping[str, CoreAddress], rules: PoolRules, listener: LinkListener) -> None:
        self.rules = rules
        self.model: Fingerprint | None = None  # in a gateway, the model whose tokenizer computes the prompts' token ids
        self.links: dict[str, EngineLink] = {}
        self._listener = listener
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        for name, core in cores.items():
            self.add(name, core)

    def add(self, name: str, core: CoreAddress) -> EngineLink:
        """Adds an engine and returns its link, which connects as soon as the pool runs."""
        link = self.links[name] = EngineLink(name, core, self._listener, self.rules.silence_s)
        if self._group is not None:
            self._tasks[name] = self._group.create_task(link.run())
        return link

    def run_in(self, group: asyncio.TaskGroup) -> None:
        """Starts a task of `group` for the connection to each engine, including engines that are added later."""
        self._group = group
        for name, link in self.links.items():
            self._tasks[name] = group.create_task(link.run())

    def remove(self, link: EngineLink) -> None:
        """Removes an engine and ends its connection. The engine then drops the sequences of this front."""
        del self.links[link.name]
        task = self._tasks.pop(link.name, None)
        if task is not None:
            task.cancel()

    def usable(self) -> list[EngineLink]:
        """The engines that may be given sequences."""
        return [link for link in self.links.values() if is_usable(link, self.rules)]

    @property
    def main(self) -> EngineLink | None:
        """The engine whose status represents all engines; None if there are no engines.

        A serving engine precedes a connected engine, and a connected engine precedes all others.
        """
        links = self.links.values()
        return next(
            (link for wanted in (_serves, _is_connected, bool) for link in links if wanted(link)),
            None,
        )

    def engine_for(self, sequence: ClientSequence) -> EngineLink | None:
        """Returns the usable engine that shall compute `sequence`, or None if the sequence must wait."""
        links = self.usable()
        if self.rules.is_gateway:
            now_s = time.monotonic()
            links = [link for link in links if can_compute(link, sequence, self.model, now_s)]
            links = with_adapter(links, self.links.values(), sequence)
            if sequence.place.corrupt_by:
                links = unlike_corrupt(links, sequence)
        elif sequence.place.refused_by:
            return None
        if len(links) <= 1:
            return links[0] if links else None
        name = chosen_engine(links, sequence)
        return None if name is None else self.links[name]

    def place_for(self, choices: list[ClientSequence]) -> EngineLink | None:
        """Returns the engine for all choices of one prompt, as `engine_for` does for a sequence.

        Counts the choices in the engine's estimate, so that the next prompt of the same request may go to another
        engine. Call `give` or `take_back` next. In a gateway, also sets the choices' adapter to the engine's own entry
        for this adapter. The front inside an engine owns the list of adapters, so the entries in its sequences need no
        change.
        """
        link = self.engine_for(choices[0])
        if link is None:
            return None
        if self.rules.is_gateway:
            adapt(link, choices)
        shared = choices[0].prompt_blocks
        blocks = () if shared is None else shared.of_size(link.estimate.index.block_size)
        for sequence in choices:
            sequence.prompt_blocks = shared
            link.estimate.sent(sequence.sequence_id, sequence.tenant, sequence.num_tokens, blocks)
        return link

    def take_back(self, link: EngineLink, choices: list[ClientSequence]) -> None:
        """Removes choices that `place_for` has counted, but that are not sent, from the engine's estimate."""
        for sequence in choices:
            link.estimate.refused(sequence.sequence_id)

    def give(self, link: EngineLink, choices: list[ClientSequence], data: bytes) -> None:
        """Sends `data`, the encoded choices of one prompt, and records which engine has the choices.

        `link`: the engine that `place_for` has chosen for them.
        """
        for sequence in choices:
            place = sequence.place
            if self.rules.is_gateway and place.last_engine and sequence.generated_ids:
                # An engine that had the sequence before may have restarted with another release or other settings.
                self._note_continuation(sequence, link)
            place.held_s = sequence.held_s(time.monotonic())
            place.engine = link.name
            place.waits_since_s = None
            place.fingerprint = link.fingerprint or place.fingerprint
        link.send(data)

    def withdraw(self, sequence: ClientSequence, *, is_moved: bool = False, is_complete: bool = False) -> None:
        """Takes a sequence away from its engine, which frees the slot and the KV blocks. Later outputs are dropped.

        `is_moved`: the sequence continues at another engine. If this engine suspects the sequence, the suspicion stays.
        `is_complete`: the answer ends at a stop string, so the engine counts the sequence as finished.
        """
        link = self.links.get(sequence.place.engine or "")
        if link is not None:
            link.estimate.ended(sequence.sequence_id)
            if link.is_connected:
                link.send(frame(Abort(sequence.sequence_id, sequence.place.attempt, is_moved, is_complete)))
        sequence.place.leave()

    def may_load_adapter(self, sequence: ClientSequence) -> bool:
        """True if the sequence should wait for an engine that has its adapter and has not failed to load it."""
        return may_load(self.links.values(), sequence)

    def why_none(self, sequence: ClientSequence) -> Exception | None:
        """Returns why no engine can ever compute a waiting sequence; None if an engine may compute it."""
        if self._has_another_model(sequence):
            return EngineDead("every engine now serves another model than the one that began this")
        causes = list(sequence.place.no_adapter_on.values())
        if causes and not self.may_load_adapter(sequence):
            return AdapterFailed(causes[-1])
        adapter = sequence.params.adapter
        if adapter is not None and is_unloaded(self.links.values(), sequence):
            return EngineDead(
                f"the LoRA adapter in {shown(adapter.path)} was unloaded from every engine after the request came; "
                "load it again, or name another model in 'model'"
            )
        if self._takes_no_embeds(sequence):
            return EngineDead(
                f"{FIELD} is no longer enabled on any engine of this model; leave it out, or start the engines with "
                "--enable-prompt-embeds"
            )
        return None

    def _takes_no_embeds(self, sequence: ClientSequence) -> bool:
        """True if every listed engine is connected, and none of them takes the embeddings of `sequence`."""
        embeds = sequence.embeds
        listed = self._listed()
        return (
            embeds is not None
            and bool(listed)
            and all(
                link.is_connected
                and link.status is not None
                and link.status.model is not None
                and link.hidden_size != embeds.width
                for link in listed
            )
        )

    def _has_another_model(self, sequence: ClientSequence) -> bool:
        """True if every listed engine is connected, and none of them serves the model that `sequence` needs."""
        expected = sequence.place.fingerprint or self.model
        listed = self._listed()
        return bool(listed) and all(
            link.is_connected
            and link.fingerprint is not None
            and continuation(expected, link.fingerprint) == "other model"
            for link in listed
        )

    def _listed(self) -> list[EngineLink]:
        """The engines that may get waiting sequences. An engine that leaves the list only finishes its sequences."""
        return [link for link in self.links.values() if not link.is_leaving]

    def _note_continuation(self, sequence: ClientSequence, link: EngineLink) -> None:
        earlier = sequence.place.fingerprint
        if continuation(earlier, link.fingerprint) == "exact" or sequence.place.is_rounded:
            return
        sequence.place.is_rounded = True
        why = (
            "no fingerprint" if earlier is None or link.fingerprint is None else differences(earlier, link.fingerprint)
        )
        logger.warning("%s continues on %s up to rounding: %s", sequence.sequence_id, link.name, why)


def _serves(link: EngineLink) -> bool:
    return link.is_serving


def _is_connected(link: EngineLink) -> bool:
    return link.is_connected
