"""`rayloom-engine bench speculation`: tokens per second of CPU time with speculation and without, at one stream.

Both engines are in this process, without HTTP. They answer the same requests in turn, so a busy moment of the machine
slows both engines. CPU time does not include the time of other programs. The bench checks that the tokens are the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rayloom_bench.markdown import table
from rayloom_bench.settings import positive
from rayloom_bench.speculation.texts import Messages, conversations, form_of
from rayloom_engine.config import EngineConfig
from rayloom_engine.llm import LLM
from rayloom_engine.sampling_params import SamplingParams

# name -> kind of the conversations, temperature
WORKLOADS = {
    "copy": ("copy", 0.0),
    "JSON, greedy": ("json", 0.0),
    "JSON, temperature 0.7": ("json", 0.7),
    "chat, greedy": ("chat", 0.0),
    "chat, temperature 0.7": ("chat", 0.7),
}


@dataclass(slots=True)
class PairedFigures:
    """The measurements of one workload; lists have an entry for each request."""

    off_tok_s: list[float] = field(default_factory=list)  # tokens per second of CPU time
    on_tok_s: list[float] = field(default_factory=list)
    draft_tokens: int = 0
    accepted_tokens: int = 0
    num_tokens: int = 0
    off_steps: int = 0
    on_steps: int = 0
    num_different: int = 0  # requests whose tokens differ between the two engines

    @property
    def ratio(self) -> float:
        """Median over the requests: the speed with speculation, divided by the speed without."""
        return statistics.median(on / off for on, off in zip(self.on_tok_s, self.off_tok_s, strict=True))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    parser.add_argument("--model", default=EngineConfig().model, help="the checkpoint")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="type of the weights")
    parser.add_argument("--draft-model", metavar="SOURCE", help="model that drafts (default: n-grams draft)")
    parser.add_argument(
        "--draft-quantization", default="auto", choices=("auto", "none", "int8"), help="weights of the draft model"
    )
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default 1)")
    parser.add_argument("--requests", type=int, default=8, help="requests of each workload (default 8)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer (default 128)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")


def run(args: argparse.Namespace) -> int:
    """Measures and prints. Returns 1 if speculation changed a token, else 0. Raises ConfigError or ModelError."""
    num_requests = positive("--requests", args.requests)
    num_tokens = positive("--tokens", args.tokens)
    assert num_requests is not None and num_tokens is not None
    settings = {
        "dtype": args.dtype,
        "threads": positive("--threads", args.threads),
        "max_model_len": 1024 + num_tokens,
        "max_num_seqs": 8,
        "num_kv_blocks": 256 + num_tokens // 16,
        "device": "cpu",
        "enable_prefix_caching": False,
    }
    speculation = {"speculation": "ngram"}
    if args.draft_model is not None:
        speculation = {
            "speculation": "draft",
            "draft_model": args.draft_model,
            "draft_quantization": args.draft_quantization,
        }
    with LLM(args.model, **settings) as off, LLM(args.model, **speculation, **settings) as on:
        for llm in (off, on):  # a first request, in which each engine measures the costs of its steps
            _answer(llm, conversations("chat", 1)[0], SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
        found = {
            name: _measure(off, on, kind, num_requests, SamplingParams(temperature=temperature, max_tokens=num_tokens))
            for name, (kind, temperature) in WORKLOADS.items()
        }
    print(_table(found, speculation["speculation"]))
    if args.json is not None:
        document = {name: {**asdict(figures), "ratio": figures.ratio} for name, figures in found.items()}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if any(figures.num_different for figures in found.values()) else 0


def _measure(off: LLM, on: LLM, kind: str, num_requests: int, settings: SamplingParams) -> PairedFigures:
    """Sends the conversations of a kind to both engines. `settings`: those of all requests."""
    figures = PairedFigures()
    form = form_of(kind)
    chats = conversations(kind, num_requests)
    for llm in (off, on) if form is not None else ():  # builds the grammar
        _answer(llm, chats[0], replace(settings, max_tokens=1, structured_outputs=form))
    before = on.stats()
    off_before = off.stats().num_steps
    for number, messages in enumerate(chats):
        params = replace(settings, seed=number, ignore_eos=form is None, structured_outputs=form)
        order = (off, on) if number % 2 else (on, off)
        answers = {llm is on: _answer(llm, messages, params) for llm in order}
        for is_on, speeds in ((False, figures.off_tok_s), (True, figures.on_tok_s)):
            speeds.append(len(answers[is_on][0]) / answers[is_on][1])
        figures.num_tokens += len(answers[True][0])
        figures.num_different += answers[True][0] != answers[False][0]
        print(f"request {number + 1} of {len(chats)}: ratio {figures.ratio:.2f}", file=sys.stderr, flush=True)
    after = on.stats()
    figures.draft_tokens = after.draft_tokens - before.draft_tokens
    figures.accepted_tokens = after.accepted_tokens - before.accepted_tokens
    figures.on_steps = after.num_steps - before.num_steps
    figures.off_steps = off.stats().num_steps - off_before
    return figures


def _answer(llm: LLM, messages: Messages, params: SamplingParams) -> tuple[tuple[int, ...], float]:
    """Returns the tokens, and the CPU time of their computation in seconds."""
    began = time.process_time()
    (answer,) = llm.chat([messages], params, use_tqdm=False)
    return answer.outputs[0].token_ids, time.process_time() - began


def _table(found: dict[str, PairedFigures], kind: str) -> str:
    """`kind`: the value of the setting `speculation`."""
    rows = [
        (
            name,
            f"{statistics.median(figures.off_tok_s):.1f}",
            f"{statistics.median(figures.on_tok_s):.1f}",
            f"{figures.ratio:.2f}x",
            f"{min(map(_quotient, figures.on_tok_s, figures.off_tok_s)):.2f}x",
            f"{figures.draft_tokens / figures.num_tokens:.2f}",
            f"{figures.accepted_tokens / figures.num_tokens:.2f}",
            f"{figures.off_steps / figures.on_steps:.2f}x",
            str(figures.num_different),
        )
        for name, figures in found.items()
    ]
    header = (
        "workload",
        "off, tok/CPU s",
        f"{kind}, tok/CPU s",
        "ratio",
        "least ratio",
        "drafted",
        "accepted",
        "fewer steps",
        "different",
    )
    return table(header, rows)


def _quotient(numerator: float, denominator: float) -> float:
    return numerator / denominator
