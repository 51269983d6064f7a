"""`rayloom-operator plan -f FILE`: what a cluster would be told to make of a manifest, and why in this shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError

from rayloom_operator.api_status import Candidate, Sizing
from rayloom_operator.errors import SpecError
from rayloom_operator.manifest import load_service
from rayloom_operator.model_facts import ModelFacts, builtin_facts
from rayloom_operator.plan import plan
from rayloom_operator.rank_memory import ELEMENT_BYTES, GIB
from rayloom_operator.resolved import Resolved, question, resolve

_COLUMNS = ("SHAPE", "RANKS", "NODES", "WEIGHTS/RANK", "KV TOKENS", "LENGTH", "REQUESTS")


def print_plan(*, manifest: Path, facts: Path | None, engine_image: str, output: str) -> int:
    """Prints the ways to cut the model and the objects, or with `output` yaml the objects alone.

    Raises SpecError for a manifest that cannot be served, or facts that are missing or cannot be used.
    """
    service = load_service(manifest)
    known = builtin_facts(service.spec.model) if facts is None else _read(facts)
    if known is None:
        source = service.spec.model.source
        command = f"rayloom-engine inspect --model {source} > facts.json"
        raise SpecError(
            (
                f"spec.model.source: what {source} needs is not known here; run `{command}` where the model can "
                "be read, and give --facts facts.json",
            )
        )
    resolved = resolve(service, service.spec.engine.image or engine_image, known)
    objects = plan(resolved, (), b"").wanted
    if output == "yaml":
        for each in objects:
            # What is in a Secret follows from the operator's own key.
            each = {name: value for name, value in each.items() if (each["kind"], name) != ("Secret", "data")}
            print("---\n" + yaml.safe_dump(each, sort_keys=False), end="")
        return 0
    print(explain(resolved, known))
    print(f"\nObjects in namespace {service.metadata.namespace}:")
    for each in objects:
        print(f"  {each['kind']:<14}  {each['metadata']['name']}")
    return 0


def explain(resolved: Resolved, facts: ModelFacts) -> str:
    """The ways that were considered as a table, the chosen one marked, and why it is that one."""
    service, sizing = resolved.service, resolved.sizing
    assert sizing is not None, "the model is known"
    asked = question(service, facts)
    accelerator, parallelism = service.spec.accelerator, service.spec.parallelism
    size = _gib(facts.num_parameters * ELEMENT_BYTES[asked.dtype])
    where = "CPUs"
    if accelerator is not None:
        where = f"nodes with {accelerator.per_node} x {accelerator.resource} of {_gib(asked.memory or 0)}"
    given = [name for name in ("tensor", "pipeline") if getattr(parallelism, name) is not None]
    why = "the fewest accelerators that fit" if accelerator is not None else "one rank, where nothing else is asked for"
    if given:
        why = f"{' and '.join(given)} as given" + ("" if len(given) == 2 else f", else {why}")
    lines = [
        f"{service.spec.model.source}: {facts.num_parameters / 1e9:.2f} billion parameters, {size} in {asked.dtype}",
        f"{where}; room for {asked.num_requests} or more requests of {sizing.max_model_len} tokens at once",
        "",
        *_table(sizing),
        "",
        f"{sizing.shape}: {why}. {sizing.pods} worker pod{'s' * (sizing.pods > 1)} with {resolved.ranks_per_pod} "
        f"rank{'s' * (resolved.ranks_per_pod > 1)} each.",
    ]
    return "\n".join([*lines, sizing.advice] if sizing.advice else lines)


def _table(sizing: Sizing) -> list[str]:
    chosen = Candidate(**sizing.model_dump(include=set(Candidate.model_fields) & set(Sizing.model_fields)), fits=True)
    ways = sorted([chosen, *sizing.alternatives], key=lambda way: (way.num_ranks, way.nodes, way.pipeline))
    rows = [_COLUMNS, *(_row(way) for way in ways)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = []
    for row, way in zip(rows, [None, *ways], strict=True):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        note = way.why_not if way is not None else ""
        lines.append(f"{'->' if way is chosen else '  '} {'  '.join(cells)}  {note}".rstrip())
    return lines


def _row(way: Candidate) -> Sequence[str]:
    figures = (way.kv_tokens, way.max_model_len, way.concurrent_requests)
    fitting = [str(figure) if way.fits else "-" for figure in figures]
    return (way.shape, str(way.num_ranks), str(way.nodes), _gib(way.weights_bytes_per_rank), *fitting)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _read(path: Path) -> ModelFacts:
    try:
        return ModelFacts.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SpecError((f"--facts: cannot read {path}: {error.strerror}",)) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise SpecError(
            (f"--facts: {path} is not what `rayloom-engine inspect` prints: {where}: {first['msg']}",)
        ) from error
