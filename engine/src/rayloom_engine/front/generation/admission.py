"""Admission: limits on a request's choices and log-probabilities, and a queue limit that works without the core."""

from __future__ import annotations

from collections.abc import Sequence

from rayloom_engine.config import EngineConfig
from rayloom_engine.core.embeds import embeds_of
from rayloom_engine.core.planning.waiting_queue import has_room
from rayloom_engine.errors import QueueFull, RequestError
from rayloom_engine.front.core_link.core_client import CoreClient
from rayloom_engine.sampling_params import SamplingParams

# limit of log-probabilities of prompt tokens in one answer: 262,144 tokens with 20 alternatives each, about 400 MB of
# JSON
MAX_PROMPT_LOGPROBS = 6_000_000
# limit of log-probabilities of output tokens in one answer; not applied to requests with at most FEW_ALTERNATIVES for
# each token
MAX_LOGPROBS = MAX_PROMPT_LOGPROBS
MAX_HELD_EMBEDS_BYTES = 1024**3  # bytes of embeddings in the prompts of all unfinished requests
FEW_ALTERNATIVES = 20  # OpenAI's limit of alternatives for a token; up to this number, an answer may have any length


def check_num_choices(config: EngineConfig, num_choices: int, tenant: str) -> None:
    """Raises RequestError if the request has more choices (prompts x n) than the queue could ever hold."""
    # When tenants share the queue, each may have half of it, rounded up.
    most = -(-config.max_queued_requests // 2) if tenant else config.max_queued_requests
    if num_choices > most:
        of_one_key = " of one API key" if tenant else ""
        raise RequestError(
            f"the request asks for {num_choices} choices in all, this server queues at most {most}{of_one_key}; "
            "send fewer prompts at a time"
        )


def check_room(config: EngineConfig, client: CoreClient, num_choices: int, tenant: str) -> None:
    """Raises QueueFull if too many sequences wait for their first token or, in a gateway, for an engine.

    The core checks its own queue too. This check does not need the core, so it also works while the core restarts. A
    gateway has a queue only while no engine accepts sequences, because engines have queues of their own.
    """
    is_gateway = client.rules.is_gateway
    if is_gateway and client.is_core_serving:
        return
    what = "an engine" if is_gateway else "their first token"
    num_waiting_of = client.num_held if is_gateway else client.num_silent
    num_slots = 0 if is_gateway else config.max_num_seqs
    num_waiting = num_waiting_of()
    if num_waiting + num_choices > config.max_queued_requests + num_slots:
        raise QueueFull(f"the queue is full: {num_waiting} sequences wait for {what}; try again soon", 1)
    num_own = num_waiting_of(tenant)
    # `has_room` checks a single choice. So the last choice is checked, as if the others were queued already.
    num_others = num_choices - 1
    if tenant and not has_room(num_own + num_others, num_waiting + num_others, num_slots, config.max_queued_requests):
        raise QueueFull(
            f"{num_own} sequences of this API key wait for {what}, and the queue's other places are "
            "kept for other keys; try again soon",
            1,
        )


def check_embeds_room(client: CoreClient, prompts: Sequence[tuple[int, ...]], tenant: str) -> None:
    """Raises QueueFull if the embeddings of all unfinished requests would take more than MAX_HELD_EMBEDS_BYTES.

    The front keeps them for a replay, and the core until their sequences end. Choices of one prompt share them. A named
    tenant may hold at most as many bytes as remain free, as in BodyBudget.
    """
    num_new = sum(len(embeds.data) for prompt in prompts if (embeds := embeds_of(prompt)))
    if not num_new:
        return
    held = {id(embeds): (each.tenant, len(embeds.data)) for each in client.unfinished() if (embeds := each.embeds)}
    num_held = sum(num for _, num in held.values())
    if held and num_held + num_new > MAX_HELD_EMBEDS_BYTES:
        raise QueueFull(
            f"the embeddings of unfinished requests take {num_held} bytes, at most {MAX_HELD_EMBEDS_BYTES} are kept; "
            "try again soon",
            1,
        )
    num_own = sum(num for owner, num in held.values() if owner == tenant)
    if tenant and held and num_held + num_own + 2 * num_new > MAX_HELD_EMBEDS_BYTES:
        raise QueueFull(
            f"the embeddings of this API key's unfinished requests take {num_own} bytes, and the rest of the "
            f"{MAX_HELD_EMBEDS_BYTES} that are kept is for other keys; try again soon",
            1,
        )


def check_num_prompt_logprobs(prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> None:
    """Raises RequestError if the answer would hold more than MAX_PROMPT_LOGPROBS log-probabilities of prompt tokens."""
    if params.prompt_logprobs is None:
        return
    num_tokens = sum(map(len, prompts))
    num_logprobs = params.n * num_tokens * (1 + params.prompt_logprobs)
    if num_logprobs > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"the answer would have {num_logprobs} log-probabilities of prompt tokens (n {params.n} x {num_tokens} "
            f"tokens in all prompts x {1 + params.prompt_logprobs} for each token), at most {MAX_PROMPT_LOGPROBS} are "
            "allowed; lower n or prompt_logprobs (with echo: logprobs), or send fewer or shorter prompts",
            "prompt_logprobs",
        )


def check_num_logprobs(prompts: Sequence[tuple[int, ...]], params: SamplingParams, max_model_len: int) -> None:
    """Raises RequestError if the answer could have more than MAX_LOGPROBS log-probabilities of output tokens.

    Answers with at most FEW_ALTERNATIVES for each token are never refused.
    """
    if params.logprobs is None or params.logprobs <= FEW_ALTERNATIVES or params.logprob_token_ids:
        return
    room = max_model_len - min(map(len, prompts))
    most = MAX_LOGPROBS // (params.n * len(prompts) * (1 + params.logprobs))
    if (room if params.max_tokens is None else params.max_tokens) > most:
        raise RequestError(
            f"logprobs {params.logprobs} for each token of a long answer is too much: the answer may have at most "
            f"{MAX_LOGPROBS} log-probabilities; set max_tokens to at most {most}, or lower logprobs",
            "logprobs",
        )
