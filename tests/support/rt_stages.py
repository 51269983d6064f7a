"""Ranks for tests: the stages of a model one after the other in this process, or every rank in a process of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

from rayloom_engine.config import EngineConfig, parse_config
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.engine import Engine, Executor, LocalExecutor
from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import Sequence
from rayloom_engine.core.speculation.drafter import SpeculationConfig
from rayloom_engine.core.step import StepPlan, StepResult
from rayloom_engine.kv.host_file import remove_files
from rayloom_engine.models.checkpoint.progress import no_progress
from rayloom_engine.parallel.group_abort import GroupAbort
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.process_group import Rendezvous, join_group, leave_group, open_store
from rayloom_engine.parallel.stage import make_stages
from rayloom_engine.worker.draft_forms import DraftForms
from rayloom_engine.worker.draft_model import DraftModel
from rayloom_engine.worker.forms import Forms
from rayloom_engine.worker.host_memory import HostMemoryPlace
from rayloom_engine.worker.loaded_rank import LoadedRank
from rayloom_engine.worker.masks import Masks
from rayloom_engine.worker.runner import Runner
from rayloom_engine.worker.start import find_model, load_rank, part_of, warm_up
from rt_embeds import EmbeddingRows
from rt_forks import forking_context

EPOCH = 1
NUM_BLOCKS = 6  # number of blocks of 16 tokens; too few to run all requests below at the same time
# Numbers of tokens of each answer. A request is preempted if answers have 16 tokens. Tests that compare only the
# log-probabilities of a prompt need no long answers.
UNTIL_PREEMPTED = 16
FOR_PROMPTS_ALONE = 2
_ANSWER_SECONDS = 120.0


def stage_config(folder: Path | str, num_stages: int = 1, **changes: Any) -> EngineConfig:
    settings = {"model": str(folder), "dtype": "float32", "device": "cpu", "num_kv_blocks": NUM_BLOCKS, "threads": 1}
    return parse_config({**settings, **changes, "pipeline_parallel_size": num_stages})


def load_stages(config: EngineConfig) -> list[LoadedRank]:
    resolved, shape = find_model(config, no_progress)
    stages = make_stages(shape.num_layers, config.pipeline_parallel_size, shape.head_layers)
    return [load_rank(config, resolved, shape, no_progress, part=ModelPart(stage)) for stage in stages]


class QueueLink:
    """A link whose two ends are queues."""

    def __init__(self, before: deque[torch.Tensor], after: deque[torch.Tensor]) -> None:
        self._before = before
        self._after = after

    def receive(self, num_tokens: int) -> torch.Tensor:
        hidden_TD = self._before.popleft()
        assert hidden_TD.shape[0] == num_tokens
        return hidden_TD

    def send(self, hidden_TD: torch.Tensor) -> None:
        self._after.append(hidden_TD)


class StagesInARow:
    """Runs every plan on each stage in turn. Returns the last stage's result. Results of other stages have only times.

    For the engine, this object is a rank in this process. It is passed to a LocalExecutor.
    """

    def __init__(self, ranks: list[LoadedRank], epoch: int = EPOCH) -> None:
        queues: list[deque[torch.Tensor]] = [deque() for _ in range(len(ranks) + 1)]
        self._queues = queues
        self.num_postponed_drafts = 0  # drafts of slots whose masks were late
        self._runners: list[Runner] = [
            rank.runner(NUM_BLOCKS, epoch, QueueLink(queues[index], queues[index + 1]) if len(ranks) > 1 else None)
            for index, rank in enumerate(ranks)
        ]

    @property
    def masks(self) -> Masks:
        """The masks of the stage that samples."""
        return self._runners[-1]._masks

    @property
    def draft_model(self) -> DraftModel:
        """The draft model of the stage that samples."""
        found = self._runners[-1].draft_model
        assert found is not None
        return found

    @property
    def has_no_draft_model(self) -> bool:
        """True also after the draft model has failed."""
        return self._runners[-1].draft_model is None

    def run(self, plan: StepPlan) -> StepResult:
        results = [runner.run(plan) for runner in self._runners]
        assert not any(self._queues), "hidden states that nobody took"
        assert not any(result.sampled or result.prompt_logprobs for result in results[:-1])
        assert {(result.step_id, result.epoch) for result in results} == {(plan.step_id, plan.epoch)}
        self.num_postponed_drafts += sum(
            bool(step.draft_token_ids) for step in plan.slots if step.slot in results[-1].postponed_slots
        )
        return results[-1]

    def forget_all(self) -> None:
        for runner in self._runners:
            runner.forget_all()


def make_engine(
    executor: Executor | StagesInARow,
    epoch: int = EPOCH,
    depth: int = 1,
    num_ahead: int = 0,
    speculation: SpeculationConfig | None = None,
    forms: Forms | None = None,
    num_host_slots: int = 0,
) -> Engine:
    """An engine whose few blocks and small budget cause chunks, preemption and resumes. `forms`: as in `engine_on`."""
    if isinstance(executor, StagesInARow):
        executor = LocalExecutor(executor)
    config = SchedulerConfig(
        num_blocks=NUM_BLOCKS,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        max_model_len=64,
        max_queued=100,
        depth=depth,
        num_ahead=num_ahead,
        speculation=speculation,
        num_host_slots=num_host_slots,
    )
    grammars = None if forms is None else DraftForms(forms)
    return Engine(Scheduler(config, epoch, grammars=grammars), executor, clock=time.monotonic)


def answers(
    engine: Engine, vocab_size: int = 256, max_tokens: int = 20, embedding: EmbeddingRows | None = None
) -> dict[str, list[SequenceOutput]]:
    """The outputs of a set of requests: greedy, seeded, forked, with a shared prefix, with logprobs.

    `embedding`: the greedy requests have the embeddings of their token ids as prompts. Their tokens are the same.
    With 12 tokens or fewer, `make_engine`'s blocks are enough for these requests, so no request is preempted.
    """
    greedy = DecodingParams(max_tokens=max_tokens, temperature=0.0)
    seeded = DecodingParams(max_tokens=max_tokens, temperature=1.0, seed=5, repetition_penalty=1.2)
    prompts: dict[str, tuple[list[int], DecodingParams, str | None]] = {
        "greedy": ([index * 7 % vocab_size for index in range(3, 43)], greedy, None),
        "prefix": ([index * 7 % vocab_size for index in range(3, 38)], greedy, None),
        "short": ([9], greedy, None),
        "seeded": ([5, 17, 33, 8, 90], seeded, None),
        "fork": ([5, 17, 33, 8, 90], DecodingParams(max_tokens=max_tokens, temperature=1.0, seed=6), "seeded"),
        "logprobs": (
            [index * 11 % vocab_size for index in range(30)],
            DecodingParams(max_tokens=max_tokens, temperature=0.0, logprobs=2, prompt_logprobs=2),
            None,
        ),
    }
    outputs: dict[str, list[SequenceOutput]] = {name: [] for name in prompts}
    for name, (ids, params, fork_of) in prompts.items():
        prompt = ids if embedding is None or params is not greedy else embedding.prompt(ids)
        engine.add(Sequence(request_id=name, prompt_ids=prompt, params=params, fork_of=fork_of))
    while engine.has_unfinished:
        for output in engine.step():
            # this field differs between runs
            outputs[output.sequence_id].append(msgspec.structs.replace(output, queue_s=0.0))
        engine.scheduler.check_integrity()
    return outputs


def ids_by_request(outputs: dict[str, list[SequenceOutput]]) -> dict[str, list[int]]:
    return {name: [token for part in parts for token in part.token_ids] for name, parts in outputs.items()}


class RankProcesses:
    """A process for each rank. After `join`, this object is an executor. Raises if a rank reports a failure."""

    def __init__(self, config: EngineConfig, context: Any = None, *, exchanges_on_host: bool = False) -> None:
        """`context`: the multiprocessing context that starts the processes; None: forking_context().

        `exchanges_on_host`: ranks exchange copies of their tensors, as ranks that share a GPU do.
        """
        self._config = config
        self._exchanges_on_host = exchanges_on_host
        self._context = context or forking_context()
        self.processes: dict[int, Any] = {}
        self._connections: dict[int, Connection] = {}
        self._num_submitted = 0
        self._token = secrets.token_hex(16)
        for rank in range(config.world_size):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Starts or restarts the process of a rank."""
        ours, theirs = self._context.Pipe()
        arguments = (self._config, rank, theirs, self._exchanges_on_host, self._token)
        process = self._context.Process(target=_rank_process, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self.processes[rank], self._connections[rank] = process, ours

    def load(self, config: EngineConfig) -> None:
        """Makes every process load its part of another model, and starts missing processes. Call `join` afterwards."""
        self._config = config
        self._ask(range(min(config.world_size, len(self.processes))), "load", config)
        for rank in range(len(self.processes), config.world_size):
            self.start(rank)

    def join(self, epoch: int, limit_s: float = 30.0) -> tuple[int, list[int]]:
        """Makes all ranks leave the old group, join a new group at a new store, and create runners for `epoch`.

        Returns the store's port, and the weight bytes that each rank has read since its process started.
        """
        port = int(self.ask(0, "open_store"))
        return port, self._ask(range(self._config.world_size), "join", port, epoch, limit_s)

    def submit(self, plan: StepPlan) -> None:
        self._send(range(self._config.world_size), "run", plan)
        self._num_submitted += 1

    def collect(self) -> StepResult:
        """The result of the rank that answers for all. Results of other ranks have only times."""
        self._num_submitted -= 1
        replies = self._replies(range(self._config.world_size), "run")
        assert not any(result.sampled or result.prompt_logprobs for answers, result in replies if not answers)
        (result,) = (result for answers, result in replies if answers)
        assert isinstance(result, StepResult)
        return result

    def forget_all(self) -> None:
        """Drops the answers to the plans in flight. Slots need no reset, because `join` creates new, empty runners."""
        for _ in range(self._num_submitted):
            with contextlib.suppress(RuntimeError):
                self._replies(range(self._config.world_size), "run")
        self._num_submitted = 0

    def send(self, rank: int, what: str, *details: object) -> None:
        self._send([rank], what, *details)

    def has_answer(self, rank: int, within_s: float) -> bool:
        return self._connections[rank].poll(within_s)

    def receive(self, rank: int, what: str) -> Any:
        """The rank's answer to the last request `what`."""
        return self._replies([rank], what)[0]

    def ask(self, rank: int, what: str, *details: object) -> Any:
        return self._ask([rank], what, *details)[0]

    def _ask(self, ranks: Any, what: str, *details: object) -> list[Any]:
        self._send(ranks, what, *details)
        return self._replies(ranks, what)

    def _send(self, ranks: Any, what: str, *details: object) -> None:
        for rank in ranks:
            with contextlib.suppress(BrokenPipeError):  # the process is dead, so receiving from it raises the error
                self._connections[rank].send((what, *details))

    def _replies(self, ranks: Any, what: str) -> list[Any]:
        # all replies are received before an error is raised, because no reply may stay in a connection
        replies = [self._answer(rank, what) for rank in ranks]
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def _answer(self, rank: int, what: str) -> Any:
        connection = self._connections[rank]
        assert connection.poll(_ANSWER_SECONDS), f"rank {rank} did not answer {what}"
        try:
            return connection.recv()
        except (EOFError, ConnectionError):
            return RuntimeError(f"rank {rank} died")

    def host_memory(self) -> tuple[str, ...]:
        """The id of each rank's host memory."""
        return tuple(self._ask(range(self._config.world_size), "host_memory"))

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join(60.0)
        remove_files(self._token)


def _rank_process(
    config: EngineConfig, number: int, connection: Connection, exchanges_on_host: bool, token: str
) -> None:
    """Runs a rank: loads the model, then answers one request after the other. `token`: names its host memory."""
    os.environ["OMP_NUM_THREADS"] = "1"
    rank: LoadedRank
    runner: Runner | None = None
    store: object = None  # kept until the group ends
    group_abort = GroupAbort()

    def load(new_config: EngineConfig) -> None:
        nonlocal config, rank
        leave()
        config = new_config
        resolved, shape = find_model(config, no_progress)
        place = HostMemoryPlace(token=token, rank=number)
        rank = load_rank(config, resolved, shape, no_progress, part=part_of(config, shape, number), host=place)
        rank.exchanges_on_host = exchanges_on_host

    def open_a_store() -> int:
        nonlocal store
        store, port = open_store("127.0.0.1")
        return port

    def leave() -> None:
        nonlocal runner
        group_abort.forget()
        runner = None
        leave_group()

    def join(port: int, epoch: int, timeout_s: float) -> int:
        nonlocal runner
        leave()
        rendezvous = Rendezvous(
            host="127.0.0.1",
            port=port,
            rank=number,
            world_size=config.world_size,
            ranks_per_stage=config.tensor_parallel_size,
        )
        group = join_group(rendezvous, timeout_s, group_abort)
        runner = rank.runner(NUM_BLOCKS, epoch, rank.link(), rank.tensor_group(group, group_abort))
        warm_up(runner, epoch)
        return rank.num_bytes_read

    def run(plan: StepPlan) -> tuple[bool, StepResult]:
        if runner is None:
            raise RuntimeError("the step before failed")
        return runner.answers, runner.run(plan)

    calls: dict[str, Callable[..., Any]] = {"load": load, "open_store": open_a_store, "join": join, "run": run}
    calls["host_memory"] = lambda: "" if rank.host is None else rank.host.file.id
    load(config)
    while True:
        what, *details = connection.recv()
        failure = None
        try:
            connection.send(calls[what](*details))
        except RuntimeError as error:
            failure = RuntimeError(str(error))
        if failure is not None:
            connection.send(failure)
            leave()  # frees peers that wait for this rank
