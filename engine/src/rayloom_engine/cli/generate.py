"""`rayloom-engine generate`: reads prompts, prints JSON lines, and runs the engine in this process.

Prompts come from --prompt, from --file or from stdin. Each line of a file or of stdin is a prompt, or a JSON object
with `prompt` or `messages`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable
from typing import Any

from rayloom_engine.cli.arguments import add_config_arguments, config_from
from rayloom_engine.common.process import set_up_logging
from rayloom_engine.errors import RequestError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="answer prompts, JSON lines out",
        usage="rayloom-engine generate [MODEL] [flags]",
        description="Answers prompts with the model in this process and prints a JSON line for each. They come from "
        "--prompt, from --file, or from stdin: a prompt a line, or a JSON object with `prompt` or `messages` a line.",
        allow_abbrev=False,
    )
    prompts = parser.add_argument_group("prompts and answers")
    source = prompts.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    source.add_argument("--file", type=argparse.FileType("r", encoding="utf-8"), help="a prompt a line; - is stdin")
    prompts.add_argument("--chat", action="store_true", help="treat each prompt as a user's chat message")
    prompts.add_argument("--max-tokens", type=int, default=128, help="most tokens of an answer. Default: 128.")
    prompts.add_argument("--temperature", type=float, default=0.0, help="0 is greedy. Default: 0.")
    prompts.add_argument("--top-p", type=float, default=1.0, help="share of the probability to draw from. Default: 1.")
    prompts.add_argument("--top-k", type=int, default=0, help="tokens to draw from; 0 is all. Default: 0.")
    prompts.add_argument("--seed", type=int, default=None, help="seed of the sampling. Default: a new one each time.")
    prompts.add_argument("--n", type=int, default=1, help="answers per prompt. Default: 1.")
    prompts.add_argument("--stop", action="append", default=None, help="a stop string; may be given several times")
    prompts.add_argument("--no-progress", action="store_true", help="no progress bar")
    add_config_arguments(parser, is_server=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    set_up_logging("generate", config.log_level if config.log_level != "info" else "warning")
    from rayloom_engine.llm import LLM
    from rayloom_engine.sampling_params import SamplingParams

    params = SamplingParams(
        n=args.n,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        stop=args.stop,
    )
    items = [{"prompt": prompt} for prompt in args.prompt] if args.prompt else list(read_items(args.file or sys.stdin))
    if not items:
        raise RequestError("no prompt was given; use --prompt, --file or stdin")
    settings = config.model_dump(mode="json", exclude_unset=True)
    with LLM(settings.pop("model", config.model), **settings) as llm:
        is_chat = [args.chat or "messages" in item for item in items]
        answers: dict[int, Any] = {}
        for kind, ask in ((False, llm.generate), (True, llm.chat)):
            chosen = [index for index, chat in enumerate(is_chat) if chat is kind]
            if chosen:
                inputs: list[Any] = [_messages(items[index]) if kind else items[index]["prompt"] for index in chosen]
                outputs = ask(inputs, params, use_tqdm=not args.no_progress)
                answers.update(zip(chosen, outputs, strict=True))
    for index, item in enumerate(items):
        answer = answers[index]
        line = {
            **item,
            "outputs": [{"text": choice.text, "finish_reason": choice.finish_reason} for choice in answer.outputs],
            "num_prompt_tokens": len(answer.prompt_token_ids),
            "num_generated_tokens": sum(len(choice.token_ids) for choice in answer.outputs),
        }
        print(json.dumps(line, ensure_ascii=False))
    return 0


def read_items(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    """Yields one item for each line that is not blank.

    Raises RequestError with the line number of an object without a prompt.
    """
    for number, line in enumerate(lines, start=1):
        text = line.rstrip("\n")
        if not text.strip():
            continue
        item: Any = {"prompt": text}
        if text.lstrip().startswith("{"):
            with contextlib.suppress(ValueError):  # A line that is not JSON is a prompt that begins with a brace.
                item = json.loads(text)
            if not isinstance(item.get("prompt"), str) and not isinstance(item.get("messages"), list):
                raise RequestError(f"line {number} has neither a text `prompt` nor a list `messages`", "prompt")
        yield item


def _messages(item: dict[str, Any]) -> list[dict[str, Any]]:
    if "messages" in item:
        messages: list[dict[str, Any]] = item["messages"]
        return messages
    return [{"role": "user", "content": item["prompt"]}]
