"""`rayloom-operator plan`: prints the objects that an operator would create for a manifest, and the chosen parallelism.

With `--rollout`, prints the steps of a rollout from one manifest to another.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import yaml
from pydantic import ValidationError

from rayloom_operator.api.costs import ELEMENT_BYTES
from rayloom_operator.api.manifest import load_service
from rayloom_operator.api.model import Model
from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.pod_template.privileges import host_paths, privileges
from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.api.shipped_facts import draft_conflict, known_facts, known_refusal
from rayloom_operator.api.sizing_status import Candidate, SizedShape, SizingStatus
from rayloom_operator.api.spec import LLMService
from rayloom_operator.cli.plan_draft import draft_lines, has_draft_of
from rayloom_operator.cli.rollout import explain_rollout
from rayloom_operator.decide.changes.plan import plan
from rayloom_operator.decide.conditions.accepted import VALID
from rayloom_operator.decide.permissions import Permissions
from rayloom_operator.decide.rollout.planner import next_step
from rayloom_operator.decide.rollout.revisions import revision_places
from rayloom_operator.decide.rollout.view import desired_of, view_of
from rayloom_operator.decide.settings import Settings
from rayloom_operator.decide.situation import Situation
from rayloom_operator.errors import SpecError
from rayloom_operator.names import Manifest
from rayloom_operator.objects.secret_digest import SECRETS_ANNOTATION
from rayloom_operator.observe.observed import Observed
from rayloom_operator.resolve.engine_refusals import check_gpus, check_kernels
from rayloom_operator.resolve.question import Question
from rayloom_operator.resolve.rank_memory import in_words
from rayloom_operator.resolve.resolved import Resolved, question, resolve
from rayloom_operator.resolve.revision import revision
from rayloom_operator.resolve.sizing import cost
from rayloom_operator.times import Now

# Empty settings, because there is no cluster. Nothing that depends on them is printed. Every annotation of a route is
# allowed, so that the route is printed.
_SETTINGS = Settings(engine_image="", operator_key=b"", permissions=Permissions(route_annotations=("*",)))
_COLUMNS = ("SHAPE", "RANKS", "NODES", "WEIGHTS/RANK", "KV TOKENS", "LENGTH", "REQUESTS", "")


def print_plan(
    *,
    manifest: Path | None,
    rollout: Sequence[Path] | None = None,
    facts: Path | None,
    old_facts: Path | None = None,
    engine_image: str,
    output: str,
) -> int:
    """Prints the plan for `manifest`, or the steps of `rollout` (old manifest, new manifest). Returns the exit code 0.

    For a manifest, prints the candidates of the sizing and the names of the objects. With `output` yaml, prints the
    objects alone. For a rollout, prints its steps. Raises SpecError if a manifest cannot be served, or if facts are
    missing or unusable.
    """
    if rollout is not None:
        if output != "text":
            raise SpecError((f"-o {output}: the steps of a rollout are printed as text only; leave it out",))
        old, new = (load_service(path) for path in rollout)
        print(_steps(old, new, old_facts, facts, engine_image))
        return 0
    assert manifest is not None, "the parser requires a manifest or a rollout"
    service = load_service(manifest)
    check_kernels(service)
    check_gpus(service)
    resolved, known = _resolved(service, facts, engine_image)
    objects = _objects(resolved, datetime.now(UTC))
    if output == "yaml":
        for each in objects:
            print("---\n" + yaml.safe_dump(_without_key(each), sort_keys=False), end="")
        return 0
    print(explain(resolved, known, is_shipped=facts is None))
    if needed := _needed_settings(service):
        print(f"\nspec.podTemplate needs these values of the operator's chart: {needed}.")
    if problem := _route_problem(service):
        print(f"\nWith the chart's default values: {problem}")
    print(f"\nObjects in namespace {service.metadata.namespace}:")
    for each in objects:
        print(f"  {each['kind']:<14}  {each['metadata']['name']}")
    return 0


def _needed_settings(service: LLMService) -> str:
    """Returns the values of the operator's chart that the pod templates need; empty if they need none."""
    names = sorted({privilege for _, privilege in privileges(service.spec.pod_template)})
    folders = sorted({path for _, path in host_paths(service.spec.pod_template)})
    values = [f"podTemplate.allow={{{','.join(names)}}}"] if names else []
    return ", ".join([*values, f"allowHostPaths={{{','.join(folders)}}}"] if folders else values)


def _route_problem(service: LLMService) -> str:
    """Returns why an operator with default settings would not create the route; empty if it would, or has none."""
    gateway = service.spec.gateway
    return "" if gateway is None or gateway.route is None else Permissions().route_problem(gateway.route)


def _without_key(manifest: Manifest) -> Manifest:
    """Returns the manifest without the data of a Secret and a digest of Secrets, which depend on the operator's key."""
    found = {name: value for name, value in manifest.items() if (manifest["kind"], name) != ("Secret", "data")}
    meta = manifest["metadata"]
    annotations = {name: value for name, value in meta.get("annotations", {}).items() if name != SECRETS_ANNOTATION}
    kept = {name: value for name, value in meta.items() if name != "annotations"}
    return found | {"metadata": kept | ({"annotations": annotations} if annotations else {})}


def _objects(resolved: Resolved, clock: datetime) -> tuple[Manifest, ...]:
    """Returns the objects that the operator would create for a new service.

    The planner's first step only stores the number of engines in the status. The second step creates the objects.
    """
    nothing, now = Observed(), Now(wall=clock, mono=0.0)
    desired = desired_of(resolved, revision(resolved))
    view = view_of(nothing, {}, desired.revision, mono=now.mono)
    stored = next_step(desired, RolloutState(), view, now.wall).state
    step = next_step(desired, stored, view, now.wall)
    gateway = resolved.service.spec.gateway
    situation = Situation(
        now=now,
        settings=_SETTINGS,
        generation=1,
        # The gateway's objects are created once the status names the gateway.
        previous={} if gateway is None else {"gateway": {"replicas": gateway.replicas}},
        memory={},
        rollout=stored,
        service=resolved.service,
        accepted=VALID,
        resolved=resolved,
        step=step,
        revisions=revision_places(resolved, {}, nothing, {}, stored, step, now=now),
    )
    return plan(situation).wanted


def explain(resolved: Resolved, facts: ModelFacts, *, is_shipped: bool) -> str:
    """Returns the candidates as a table with a mark at the chosen candidate, and the reason for the choice.

    `is_shipped`: the facts come with the operator, and not from an inspection.
    """
    spec = resolved.service.spec
    sizing = resolved.sizing
    asked = question(resolved.service, facts)
    assert sizing is not None, "the model is known"
    size = in_words(facts.num_parameters * ELEMENT_BYTES[asked.dtype])
    active = facts.num_active_parameters
    of_token = "" if active is None else f", of which a token uses {active / 1e9:.2f} billion"
    where = "CPUs"
    why = "one rank, where nothing else is given"
    if spec.accelerator is not None:
        where = f"Nodes with {asked.per_node} x {spec.accelerator.resource} of {in_words(asked.memory or 0)}"
        why = "the fewest accelerators that fit"
    if given := [name for name, number in spec.parallelism if number is not None]:
        why = f"{' and '.join(given)} as given"
    lines = [
        f"{spec.model.source}: {facts.num_parameters / 1e9:.2f} billion parameters{of_token}, {size} in {asked.dtype}.",
        *_quantised(facts, asked),
        *draft_lines(resolved, asked, is_shipped=is_shipped),
        *_adapters(resolved, asked),
        f"{where}; {asked.num_requests} or more requests of {sizing.max_model_len} tokens at once.",
        "",
        *_table(sizing),
        "",
        f"{sizing.shape}: {why}. Worker pods: {sizing.pods}, ranks in each: {resolved.ranks_per_pod}.",
    ]
    return "\n".join([*lines, sizing.advice] if sizing.advice else lines)


def _quantised(facts: ModelFacts, asked: Question) -> list[str]:
    """Returns how ranks hold the weights of a quantised checkpoint; nothing if its weights are dense."""
    if facts.quantization is None:
        return []
    where = "CPUs" if asked.is_cpu else "accelerators"
    held = "as they are" if asked.keeps_quantised else f"as {asked.dtype}"
    what = f"{facts.quantization}, {in_words(facts.checkpoint_bytes)}"
    return [f"The checkpoint has quantised weights ({what}); ranks on {where} hold them {held}."]


def _adapters(resolved: Resolved, asked: Question) -> list[str]:
    """Returns the memory that each rank keeps for LoRA adapters; nothing if the manifest has none."""
    if resolved.service.spec.model.adapters is None:
        return []
    room = asked.adapters
    if room is None or resolved.sizing is None or resolved.sizing.adapters_bytes_per_rank is None:
        return [
            "The memory of LoRA adapters is not counted, because the facts do not give it: the engine does not support "
            "adapters of this model, or an engine of an earlier version wrote the facts."
        ]
    size = in_words(resolved.sizing.adapters_bytes_per_rank)
    return [
        f"Each rank keeps {size} for LoRA adapters: {room.num_adapters} in memory at once, of rank {room.lora_rank}."
    ]


def _steps(old: LLMService, new: LLMService, old_facts: Path | None, facts: Path | None, engine_image: str) -> str:
    if old.metadata.name != new.metadata.name:
        names = f"{old.metadata.name} and {new.metadata.name}"
        raise SpecError((f"metadata.name: {names} are two services; a rollout is a change of one",))
    check_kernels(new)
    check_gpus(new)
    after, _ = _resolved(new, facts, engine_image)
    is_same = old.spec.model.source == new.spec.model.source and has_draft_of(new.spec.model, old.spec.model)
    if old_facts is None and is_same:
        old_facts = facts
    before, _ = _resolved(old, old_facts, engine_image, "--old-facts")
    return explain_rollout(before, after, new.spec.rollout)


def _resolved(
    service: LLMService, facts: Path | None, engine_image: str, flag: str = "--facts"
) -> tuple[Resolved, ModelFacts]:
    model = service.spec.model
    backend = service.spec.engine.args.model_backend
    known = known_facts(model, backend) if facts is None else _read(facts, flag)
    if facts is None and (refusal := known_refusal(model, backend)):
        raise SpecError((f"spec.model.source: the engine cannot serve {model.source}: {refusal}",))
    if known is None:
        raise SpecError((f"spec.model.source: run {_advice(model, backend)}, and add {flag} facts.json",))
    if facts is None and model.draft is not None and (conflict := draft_conflict(model)):
        raise SpecError((f"spec.model.draft.source: the engine refuses {model.draft.source}: {conflict}",))
    if model.draft is not None and known.draft is None:
        again = f"run {_advice(model, backend)}, and use its output"
        raise SpecError((f"{flag}: {facts} does not have the facts of the draft model {model.draft.source}; {again}",))
    return resolve(service, service.spec.engine.image or engine_image, known), known


def _advice(model: Model, backend: str | None) -> str:
    source = model.source
    where = "where it can be read"
    if model.source_kind == "pvc":
        claim, slash, path = source.removeprefix("pvc://").partition("/")
        source = f"FOLDER{slash}{path}"
        where = f"where the claim {claim} is mounted at FOLDER"
    command = ["rayloom-engine", "inspect", "--model", source]
    command += ["--revision", model.revision] if model.revision is not None else []
    command += ["--model-backend", backend] if backend is not None else []
    if (draft := model.draft) is not None:
        command += ["--draft-model", draft.source if draft.claim is None else f"DRAFT_FOLDER/{draft.claim_path}"]
        command += ["--draft-revision", draft.revision] if draft.revision is not None else []
        if draft.claim is not None:
            where += f", and the claim {draft.claim} is mounted at DRAFT_FOLDER"
    return f"`{shlex.join(command)} > facts.json` {where}"


def _table(sizing: SizingStatus) -> list[str]:
    ways = sorted([sizing, *sizing.alternatives], key=cost)
    rows = [_COLUMNS, *map(_row, ways)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    marks = ["  ", *("->" if way is sizing else "  " for way in ways)]
    return [
        "  ".join([mark, *(cell.rjust(width) for cell, width in zip(row, widths[:-1], strict=False)), row[-1]]).rstrip()
        for mark, row in zip(marks, rows, strict=True)
    ]


def _row(way: SizedShape) -> tuple[str, ...]:
    figures = (way.kv_tokens, way.max_model_len, way.concurrent_requests)
    note = way.why_not if isinstance(way, Candidate) else ""
    sizes = (way.shape, str(way.num_ranks), str(way.nodes), in_words(way.weights_bytes_per_rank))
    return (*sizes, *(str(figure or "-") for figure in figures), note)


def _read(path: Path, flag: str) -> ModelFacts:
    try:
        written = path.read_bytes()
        if problem := _no_facts(written):
            raise SpecError((f"{flag}: {path} {problem}",))
        facts = ModelFacts.model_validate_json(written)
    except OSError as error:
        raise SpecError((f"{flag}: cannot read {path}: {error.strerror}",)) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, ("", *first["loc"]))).lstrip(".") or "document"
        problem = f"{flag}: {path} is not what `rayloom-engine inspect` prints: {where}: {first['msg']}"
        raise SpecError((problem,)) from error
    if facts.costs is None:
        again = "run `rayloom-engine inspect` of the operator's version"
        raise SpecError((f"{flag}: {path} has no costs, so an engine of an earlier version wrote it; {again}",))
    return facts


def _no_facts(written: bytes) -> str:
    """Returns the error in the output of a failed inspection; empty if the output has no error."""
    if not written.strip():
        return (
            "is empty, because `rayloom-engine inspect` failed; run it again without redirecting its output, and "
            "follow its error message"
        )
    try:
        document = json.loads(written)
    except ValueError:
        return ""  # ModelFacts.model_validate_json reports the syntax error
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict):
        return ""
    return f"says that the engine cannot serve the model: {error.get('message')}"
