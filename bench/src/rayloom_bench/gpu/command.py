"""`rayloom-engine bench gpu`: one rank on a GPU with random weights of a model's sizes, and the card's limits.

Prints the times of decode steps (with and without CUDA graphs), of prompts, of steps of a whole engine, and of each
kernel. No checkpoint is read: speed does not depend on the weights' values.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import sys
from importlib.metadata import version
from pathlib import Path

from rayloom_bench.settings import page_file

PAGE = "gpu.md"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shape", default="llama-3.1-8b", help="llama-3.1-8b (default) or smollm2-135m")
    parser.add_argument("--batches", type=_numbers, default=(1, 4, 16, 64, 256), help="sequences of decode steps")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a sequence in decode steps (default 1024)")
    parser.add_argument("--prompts", type=_numbers, default=(512, 2048, 8192, 32768), help="tokens of prompts")
    parser.add_argument("--long-context", type=int, help="one more prompt of this length, and decode steps behind it")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help=f"write {PAGE} into this folder")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and prints. Returns 0, or 2 if there is no GPU or the shape is unknown."""
    import torch

    from rayloom_bench.gpu.rank import SHAPES

    if args.shape not in SHAPES:
        print(f"bench gpu: --shape {args.shape!r} is unknown; use one of {', '.join(SHAPES)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("bench gpu: torch sees no GPU here; run it on a machine with one", file=sys.stderr)
        return 2
    target = page_file(args.page, PAGE)
    text = _measured(args, torch.device("cuda"))
    print(text, flush=True)
    if target is not None:
        target.write_text(text + "\n", encoding="utf-8")
    return 0


def _measured(args: argparse.Namespace, device: object) -> str:
    import torch

    from rayloom_bench.gpu import page
    from rayloom_bench.gpu.kernels import kernel_times
    from rayloom_bench.gpu.limits import measure_limits
    from rayloom_bench.gpu.rank import make_rank
    from rayloom_bench.gpu.steps import (
        decode_batch,
        decode_step,
        greedy_slots,
        time_decode,
        time_engine,
        time_prefill,
    )
    from rayloom_engine.worker.torch_computation import DecodeLimits

    assert isinstance(device, torch.device)
    limits = measure_limits(device)
    _say(page.limits_text(limits))
    most, longest = max(args.batches), max(*args.prompts, args.context, args.long_context or 0)
    rank = make_rank(args.shape, num_tokens=max(most * args.context, longest) + 64, device=device)
    _say(rank.model.kernels.description)
    plain = rank.computation(None)
    graphs = rank.computation(DecodeLimits(max_num_seqs=most, max_context_len=max(args.context, longest) + 64))
    _say("graphs captured")
    decodes = []
    for batch_size in args.batches:
        for computation, has_graph in ((plain, False), (graphs, True)):
            decodes.append(time_decode(rank, computation, batch_size, args.context, has_graph=has_graph))
            _say(str(decodes[-1]))
    prefills = []
    for num_tokens in args.prompts:
        prefills.append(time_prefill(rank, plain, num_tokens))
        _say(str(prefills[-1]))
    longs = []
    if args.long_context:
        prefills.append(time_prefill(rank, plain, args.long_context, rounds=1))
        longs.append(time_decode(rank, graphs, 1, args.long_context, has_graph=True))
    engines = [time_engine(rank, graphs, batch_size) for batch_size in args.batches if batch_size <= 64]
    kernels = {}
    for batch_size in (args.batches[0], args.batches[len(args.batches) // 2]):
        step = functools.partial(decode_step, graphs, decode_batch(batch_size, args.context), greedy_slots(batch_size))
        kernels[batch_size] = kernel_times(step)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    versions = f"torch {torch.__version__}, Triton {version('triton')}, {today}"
    return "\n\n".join(
        (
            "# One rank on a GPU",
            f"`rayloom-engine bench gpu --shape {args.shape}`: random weights in bfloat16; {versions}.",
            page.limits_text(limits),
            "## Decode steps",
            page.decode_table([*decodes, *longs], limits),
            "## Prompts, in chunks of 8,192 tokens",
            page.prefill_table(prefills, limits),
            "## Decode steps of a whole engine, contexts of 128 to 192 tokens",
            page.engine_table(engines),
            *(
                f"## Kernels of a decode step, sequences: {batch_size}\n\n{page.kernel_table(times)}"
                for batch_size, times in kernels.items()
            ),
        )
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(","))
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError("give numbers from 1, separated by commas")
    return numbers
