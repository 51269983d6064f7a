"""A core without a model: it speaks the protocol, and answers each sequence with the tokens of a script.

A script is a function of the Submit. Token k of a sequence is script(submit)[k]. So a sequence that is submitted again
continues exactly, as with the real core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rayloom_engine.core.adapter import ServedAdapter
from rayloom_engine.core.load import SchedulerLoad
from rayloom_engine.core.stats import SchedulerStats
from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.protocol.fingerprint import Fingerprint
from rayloom_engine.protocol.framing import frame, front_decoder, read_frame
from rayloom_engine.protocol.front_auth import core_proof, front_proof, is_same_proof
from rayloom_engine.protocol.gateway_requests import GatewayRequests
from rayloom_engine.protocol.messages import (
    HASH_BYTES,
    PROTOCOL_VERSION,
    Abort,
    CacheChanges,
    CoreMessage,
    CoreStatus,
    Draining,
    EngineAdapters,
    FetchFile,
    FrontChallenge,
    FrontMessage,
    Hello,
    LoadReport,
    Outputs,
    PhaseProgress,
    RankReport,
    Refused,
    SequenceOutput,
    ServedModel,
    Submit,
    SubmitChoices,
    WantCache,
    WantStatus,
    Welcome,
)
from rayloom_engine.protocol.text_files import read_part
from rt_byte_model import END, VOCAB_SIZE

TOKEN = "secret"
BLOCK_SIZE = 16
STATUS_S = 1.0  # seconds between two statuses

FINGERPRINT = Fingerprint(
    architecture="LlamaForCausalLM",
    commit="c0ffee",
    content_hash="c0ffee",
    tokenizer_hash="t",
    dtype="bfloat16",
    compute_dtype="bfloat16",
    quantization="none",
    arithmetic="C library 12ab, avx512",
    tensor_parallel_size=2,
    engine_version="1.0",
    max_model_len=1024,
)

Alternatives = Callable[[Sequence[int]], Sequence[tuple[int, float]]]
Script = Callable[[Submit], Sequence[int]]


def say(text: str) -> Script:
    """Returns a script: the bytes of `text`, then EOS."""
    return lambda _submit: [*text.encode(), END]


class FakeCore:
    """A core without a model. All methods and attributes belong to the event loop in which `serve` runs."""

    def __init__(self, model_folder: Path, *, max_model_len: int = 512) -> None:
        self.state = "serving"
        self.message = ""
        self.is_draining = False
        self.num_running = 1  # the number of running sequences in the status, independent of the real number
        self.is_mute = False  # True: sends no statuses by itself, like a core that hangs
        self.is_responsive = True  # sends a status when the front requests one
        self.num_status_requests = 0
        self.lost = ""  # during a recovery: the lost rank
        self.epoch = 1
        self.gateway_requests = GatewayRequests()
        self.cached: list[bytes] = []  # hashes of cached blocks, as `prompt_hashes` computes them
        self.load = SchedulerLoad(decode_token_cost=2.0)  # differs from a gateway's assumption before the first report
        self.num_index_requests = 0
        self._index_number = 0
        self.num_blocks, self.num_free_blocks = 10, 7
        self.hellos: list[Hello] = []
        self.num_refused_hellos = 0
        # adapters in the status, which the front reports or a test sets; None: the front has not reported them yet
        self.adapters: tuple[ServedAdapter, ...] | None = ()
        self.takes_adapters = True
        self.adapter_lists: list[tuple[ServedAdapter, ...]] = []  # all lists that the front has sent
        self.drains: list[bool] = []  # `is_draining` of each message of the front about its drain
        self.num_fetches = 0  # number of parts of text files that were requested
        self.model: ServedModel | None = ServedModel(
            path=str(model_folder),
            architecture="LlamaForCausalLM",
            num_parameters=1000,
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            eos_token_ids=(END,),
            dtype="float32",
            compute_dtype="float32",
            weight_bytes=4000,
            hidden_size=4,
        )
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.reset()

    def reset(self) -> None:
        """Resets the state that tests change. Connections stay open."""
        self.script: Script = say("Hello there.")
        self.tokens_per_output = 1
        self.hold_after: int | None = None  # number of tokens after which each sequence waits for `release`
        # function of the token ids that returns the most likely next tokens; None: the only such token is "!"
        self.alternatives: Alternatives | None = None
        self.refusal: tuple[str, str] | None = None  # reason and message for every Submit
        self.is_silent = False  # ignores Submits
        self.submits: list[Submit] = []
        self.num_prompts = 0  # number of prompts that the front sent once for several Submits
        self.aborts: list[str] = []
        self.completed: list[str] = []  # those of `aborts` whose answer was complete
        self._released = asyncio.Event()

    async def serve(self, path: Path) -> None:
        """Listens until it is cancelled."""
        server = await asyncio.start_unix_server(self._accept, path=str(path))
        async with server:
            while True:
                await asyncio.sleep(STATUS_S)
                if not self.is_mute:
                    self.send_status()

    async def listen(self, key: str) -> tuple[asyncio.Server, str]:
        """Opens a port for gateways that have `key`. Returns the server and its HOST:PORT."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            _write(writer, FrontChallenge(nonce="challenge", version=PROTOCOL_VERSION))
            try:
                hello = front_decoder.decode(await read_frame(reader))
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            assert isinstance(hello, Hello)
            if not is_same_proof(hello.proof, front_proof(key, "challenge", hello)):
                self.num_refused_hellos += 1
                writer.close()
                return
            welcome = Welcome(epoch=self.epoch, pid=self.epoch, version=PROTOCOL_VERSION)
            proof = core_proof(key, "challenge", hello.nonce, welcome)
            await self._converse(hello, msgspec.structs.replace(welcome, proof=proof), reader, writer)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        return server, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def release(self) -> None:
        """Continues the waiting sequences. From now on, no sequence waits."""
        self.hold_after = None
        self._released.set()

    def die(self) -> None:
        """Behaves as if killed and restarted: ends every connection, forgets all sequences, begins an epoch."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        for writer in self._writers:
            writer.transport.abort()
        self.epoch += 1
        self.cached = []
        self._index_number = 0

    def cache(self, hashes: Sequence[bytes], *, is_told: bool = True) -> None:
        """Adds blocks to the prefix index. `is_told`: False if the message about these blocks is lost."""
        self.cached += hashes
        self._index_number += 1
        for writer in self._writers if is_told else ():
            _write(writer, self._changes(hashes))

    def send_load(self) -> None:
        for writer in self._writers:
            _write(writer, LoadReport(self.load))

    def send_output(self, output: SequenceOutput) -> None:
        for writer in self._writers:
            _write(writer, Outputs((output,)))

    def refuse(self, sequence_id: str, reason: str, text: str) -> None:
        """Refuses a sequence that was accepted before."""
        for writer in self._writers:
            _write(writer, Refused(sequence_id=sequence_id, reason=reason, message=text))

    def send_status(self) -> None:
        for writer in self._writers:
            _write(writer, self._status())

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = front_decoder.decode(await read_frame(reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            return
        if not isinstance(hello, Hello) or hello.token != TOKEN:
            self.num_refused_hellos += 1
            writer.close()
            return
        await self._converse(hello, Welcome(epoch=self.epoch, pid=self.epoch, version=PROTOCOL_VERSION), reader, writer)

    async def _converse(
        self, hello: Hello, welcome: Welcome, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            self.hellos.append(hello)
            self._writers.add(writer)
            _write(writer, welcome)
            _write(writer, self._status())
            while True:
                self._take(front_decoder.decode(await read_frame(reader)), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self._writers.discard(writer)
            writer.close()

    def _take(self, message: FrontMessage, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, Abort):
            self.aborts.append(message.sequence_id)
            if message.is_complete:
                self.completed.append(message.sequence_id)
            task = self._tasks.pop(message.sequence_id, None)
            if task is not None:
                task.cancel()
        elif isinstance(message, Draining):
            self.drains.append(message.is_draining)
            self.is_draining = message.is_draining
        elif isinstance(message, EngineAdapters):
            self.adapters = message.adapters
            self.adapter_lists.append(message.adapters)
            self.send_status()
        elif isinstance(message, WantStatus):
            self.num_status_requests += 1
            if self.is_responsive:
                _write(writer, self._status())
        elif isinstance(message, FetchFile):
            self.num_fetches += 1
            _write(writer, read_part(self.model, message))
        elif isinstance(message, WantCache):
            self.num_index_requests += 1
            _write(writer, self._changes(self.cached, num_parts=1))
            _write(writer, LoadReport(self.load))
        elif isinstance(message, SubmitChoices):
            self.num_prompts += 1
            for submit in message.with_prompt():
                self._take(submit, writer)
        elif isinstance(message, Submit):
            self.submits.append(message)
            if self.refusal is not None:
                reason, text = self.refusal
                refused = Refused(
                    sequence_id=message.sequence_id,
                    reason=reason,
                    message=text,
                    retry_after_s=7,
                    attempt=message.attempt,
                )
                _write(writer, refused)
            elif not self.is_silent:
                self._tasks[message.sequence_id] = asyncio.create_task(self._generate(message, writer))

    async def _generate(self, submit: Submit, writer: asyncio.StreamWriter) -> None:
        tokens = list(self.script(submit))[: submit.params.max_tokens]
        position = len(submit.generated_ids)
        is_first = True
        while position < len(tokens):
            if self.hold_after is not None and position >= self.hold_after:
                await self._released.wait()
            await asyncio.sleep(0)
            new = tokens[position : position + self.tokens_per_output]
            position += len(new)
            is_last = position == len(tokens)
            is_stop = is_last and new[-1] in (END, *submit.params.stop_token_ids)
            output = SequenceOutput(
                sequence_id=submit.sequence_id,
                token_ids=tuple(new),
                logprobs=self._logprobs(submit, new),
                prompt_logprobs=_logprobs(submit.prompt_ids[1:], submit.params.prompt_logprobs) if is_first else (),
                finish_reason=("stop" if is_stop else "length") if is_last else None,
                stop_token_id=new[-1] if is_stop else None,
                num_cached_tokens=3 if is_first else 0,
                attempt=submit.attempt,
            )
            is_first = False
            _write(writer, Outputs((output,)))

    def _logprobs(self, submit: Submit, new: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        if self.alternatives is None:
            return _logprobs(new, submit.params.logprobs)
        top = tuple(self.alternatives(submit.prompt_ids))[: submit.params.logprobs]
        return (TokenLogprobs(token_id=new[0], logprob=-0.5, rank=1, top=top),)

    def _changes(self, added: Sequence[bytes], num_parts: int = 0) -> CacheChanges:
        return CacheChanges(
            start=self.epoch,
            number=self._index_number,
            block_size=BLOCK_SIZE,
            added=b"".join(content[:HASH_BYTES] for content in added),
            num_parts=num_parts,
        )

    def _status(self) -> CoreStatus:
        is_starting = self.state == "starting"
        phase = PhaseProgress(name="load", seconds=0.5, done=1, total=2, unit="bytes", is_finished=not is_starting)
        return CoreStatus(
            state=self.state,
            epoch=self.epoch,
            executor="uni",
            step=4,
            last_token_age_s=None if is_starting else 0.25,
            phases=(phase,),
            stats=SchedulerStats(
                num_running=self.num_running,
                num_blocks=self.num_blocks,
                num_free_blocks=self.num_free_blocks,
                num_preemptions=2,
            ),
            ranks=(
                RankReport(
                    rank=0, node="here", host="here", pid=1, phase="idle", heartbeat_age_s=0.1, step=4, memory_bytes=5
                ),
            ),
            model_folder=self.model.path if self.model is not None else "",
            model=None if is_starting else self.model,
            message=self.message,
            lost=self.lost,
            lost_node="there" if self.lost else "",
            is_draining=self.is_draining,
            adapters=self.adapters,
            takes_adapters=self.takes_adapters,
            gateway_requests=self.gateway_requests,
        )


def _logprobs(token_ids: Sequence[int], num_top: int | None) -> tuple[TokenLogprobs, ...]:
    """A logprob of -0.5 for each token, with "!" as the most likely token. Empty if the request has no logprobs."""
    if num_top is None:
        return ()
    top = ((ord("!"), -0.25),)[:num_top]
    return tuple(TokenLogprobs(token_id=token_id, logprob=-0.5, rank=2, top=top) for token_id in token_ids)


def _write(writer: asyncio.StreamWriter, message: CoreMessage) -> None:
    if not writer.is_closing():
        writer.write(frame(message))
