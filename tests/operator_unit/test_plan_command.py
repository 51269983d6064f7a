"""`rayloom-operator plan`: its output for a manifest, and its refusals."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rayloom_operator.__main__ import main
from rayloom_operator.api.rollout.spec import Rollout
from rayloom_operator.api.shipped_facts import published_models, shipped_facts
from rayloom_operator.cli.rollout import explain_rollout
from rayloom_operator.resolve.revision import revision
from rt_operator import make_resolved

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "qwen2.5-72b-tp8-pp2.yaml"
SMALL = ROOT / "examples" / "smollm2-tp3.yaml"


@pytest.fixture
def facts():
    return str(ROOT / "examples" / "facts" / "qwen2.5-72b.json")


def test_the_table_marks_the_choice_and_gives_reasons_against_the_others(facts, capsys):
    assert main(["plan", "-f", str(EXAMPLE), "--facts", facts]) == 0
    lines = capsys.readouterr().out.splitlines()

    assert lines[0] == "hf://Qwen/Qwen2.5-72B-Instruct: 72.71 billion parameters, 135.4 GiB in bfloat16."
    assert [line.split()[:2] for line in lines if line.startswith("->")] == [["->", "TP8xPP2"]]
    (one_node,) = [line for line in lines if "TP8xPP1" in line]
    assert one_node.endswith("64 x 32768 tokens need 80.0 GiB of KV cache on a rank, and there is room for 55.4 GiB")
    assert "TP8xPP2: tensor and pipeline as given. Worker pods: 2, ranks in each: 8." in lines


def test_the_document_shows_the_printed_lines(facts, capsys):
    main(["plan", "-f", str(EXAMPLE), "--facts", facts])
    printed = capsys.readouterr().out.partition("\nObjects")[0]

    assert printed in (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")


def test_the_page_on_gpus_shows_the_printed_lines(capsys):
    examples = ROOT / "examples"
    main(["plan", "-f", str(examples / "qwen3-8b-gpu.yaml"), "--facts", str(examples / "facts" / "qwen3-8b.json")])
    printed = capsys.readouterr().out.partition("\nObjects")[0]

    assert printed in (ROOT / "docs" / "quickstart-gpu.md").read_text(encoding="utf-8")


def test_a_model_whose_facts_are_shipped_needs_no_others(capsys):
    example = ROOT / "examples" / "qwen3-8b-gpu.yaml"
    main(["plan", "-f", str(example), "--facts", str(ROOT / "examples" / "facts" / "qwen3-8b.json")])
    printed = capsys.readouterr().out

    assert main(["plan", "-f", str(example)]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("source", [source for source in shipped_facts() if source.startswith("hf://")])
def test_each_shipped_model_is_planned_on_gpus(source, tmp_path, capsys):
    assert plan_on_gpus(tmp_path, source) == 0
    assert capsys.readouterr().out.startswith(f"{source}: ")


def test_another_revision_of_a_shipped_model_needs_facts_of_its_own(tmp_path, capsys):
    document = yaml.safe_load((ROOT / "examples" / "qwen3-8b-gpu.yaml").read_text(encoding="utf-8"))
    document["spec"]["model"]["revision"] = "v2"
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")

    assert main(["plan", "-f", str(path)]) == 2
    assert "inspect --model hf://Qwen/Qwen3-8B --revision v2 > facts.json" in capsys.readouterr().err


def test_facts_of_an_engine_of_an_earlier_version_are_refused(tmp_path, capsys):
    facts = json.loads((ROOT / "examples" / "facts" / "qwen2.5-72b.json").read_text(encoding="utf-8"))
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({name: part for name, part in facts.items() if name != "costs"}), encoding="utf-8")

    assert main(["plan", "-f", str(EXAMPLE), "--facts", str(path)]) == 2
    assert "has no costs, so an engine of an earlier version wrote it" in capsys.readouterr().err


def test_without_a_cluster_the_message_for_missing_memory_names_the_field(tmp_path, capsys):
    path = tmp_path / "no-memory.yaml"
    path.write_text((ROOT / "examples" / "qwen3-8b-gpu.yaml").read_text().replace("    memory: 24Gi\n", ""))

    assert main(["plan", "-f", str(path), "--facts", str(ROOT / "examples" / "facts" / "qwen3-8b.json")]) == 2
    message = "spec.accelerator.memory is left out, and without a cluster there are no node labels"
    assert message in capsys.readouterr().err


def test_a_built_in_model_needs_no_facts_and_objects_are_named(capsys):
    assert main(["plan", "-f", str(SMALL)]) == 0
    printed = capsys.readouterr().out

    assert "->  TP3xPP1" in printed
    _, _, objects = printed.partition("Objects in namespace default:\n")
    assert [line.split()[0] for line in objects.splitlines()] == [
        "ServiceAccount",
        "Service",
        "PodDisruptionBudget",
        "NetworkPolicy",
        "ControllerRevision",
        "ConfigMap",
        "Secret",
        "RayCluster",
    ]


def test_the_yaml_can_be_applied_except_for_the_secrets_content(capsys):
    assert main(["plan", "-f", str(SMALL), "-o", "yaml"]) == 0
    objects = {each["kind"]: each for each in yaml.safe_load_all(capsys.readouterr().out)}

    assert objects["RayCluster"]["spec"]["workerGroupSpecs"][0]["rayStartParams"]["num-cpus"] == "3"
    assert "data" not in objects["Secret"]
    assert "config.json" in objects["ConfigMap"]["data"]


def test_the_objects_of_a_gateway_are_printed_too(tmp_path, capsys):
    manifest = yaml.safe_load(SMALL.read_text(encoding="utf-8"))
    ingress = {"host": "llm.example.com", "annotations": {"example.com/waf": "on"}}
    manifest["spec"]["gateway"] = {"route": {"ingress": ingress}}
    path = tmp_path / "service.yaml"
    path.write_text(yaml.safe_dump(manifest), encoding="utf-8")

    assert main(["plan", "-f", str(path)]) == 0
    printed = capsys.readouterr().out
    refusal = "route.ingress.annotations: this operator does not allow example.com/waf"
    assert f"With the chart's default values: {refusal}" in printed
    assert main(["plan", "-f", str(path), "-o", "yaml"]) == 0
    found = list(yaml.safe_load_all(capsys.readouterr().out))
    name = manifest["metadata"]["name"]
    made = [(each["kind"], each["metadata"]["name"]) for each in found]
    for kind in ("Service", "PodDisruptionBudget", "Deployment", "Ingress"):
        assert (kind, f"{name}-gateway") in made
    (engines,) = [each for each in found if each["metadata"]["name"] == f"{name}-engines"]
    assert "annotations" not in engines["metadata"]  # the digest of the Secrets depends on the operator's key
    assert all("data" not in each for each in found if each["kind"] == "Secret")


def test_pods_are_printed_with_their_templates_and_the_settings_that_they_need(tmp_path, capsys):
    manifest = yaml.safe_load(SMALL.read_text(encoding="utf-8"))
    security = {"capabilities": {"add": ["IPC_LOCK"]}}
    volume = {"name": "data", "hostPath": {"path": "/data"}}
    containers = [{"name": "ray-worker", "securityContext": security}]
    manifest["spec"]["podTemplate"] = {"worker": {"spec": {"volumes": [volume], "containers": containers}}}
    path = tmp_path / "service.yaml"
    path.write_text(yaml.safe_dump(manifest), encoding="utf-8")

    assert main(["plan", "-f", str(path)]) == 0
    assert (
        "spec.podTemplate needs these values of the operator's chart: podTemplate.allow={IPC_LOCK}, "
        "allowHostPaths={/data}.\n"
    ) in capsys.readouterr().out
    assert main(["plan", "-f", str(path), "-o", "yaml"]) == 0
    objects = {each["kind"]: each for each in yaml.safe_load_all(capsys.readouterr().out)}
    pod = objects["RayCluster"]["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    assert volume in pod["volumes"]
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([str(EXAMPLE), "--facts", "/not/there"], "cannot read /not/there: No such file"),
        (
            [str(EXAMPLE), "--facts", str(EXAMPLE)],
            "is not what `rayloom-engine inspect` prints: document: Invalid JSON",
        ),
    ],
)
def test_an_unusable_manifest_ends_with_2_and_a_sentence(arguments, sentence, capsys):
    assert main(["plan", "-f", *arguments]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        ({"source": "pvc://claim/a/b.gguf"}, "inspect --model FOLDER/a/b.gguf > facts.json` where the claim claim is"),
        ({"source": "pvc://claim"}, "inspect --model FOLDER > facts.json` where the claim claim is mounted at FOLDER,"),
        ({"source": "hf://a/b", "revision": "v 2"}, "--model hf://a/b --revision 'v 2' > facts.json` where it can be"),
        ({"source": "file:///my models/m"}, "--model 'file:///my models/m' > facts.json`"),
    ],
)
def test_the_advice_can_be_typed(model, advice, tmp_path, capsys):
    document = yaml.safe_load(SMALL.read_text(encoding="utf-8"))
    document["spec"]["model"] = model
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")

    assert main(["plan", "-f", str(path)]) == 2
    assert advice in capsys.readouterr().err


def test_a_model_that_does_not_fit_ends_with_2_and_a_choice_that_does(facts, tmp_path, capsys):
    document = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    document["spec"]["parallelism"] = {"tensor": 8, "pipeline": 1}
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")

    assert main(["plan", "-f", str(path), "--facts", facts]) == 2
    assert "spec.parallelism: TP8xPP1 does not fit" in (said := capsys.readouterr().err)
    assert said.rstrip().endswith("use tensor 8 and pipeline 2, which fit")


@pytest.fixture
def changed(tmp_path):
    """The manifest of a small model with changes, as a file."""

    def write(name, **changes):
        document = yaml.safe_load(SMALL.read_text(encoding="utf-8"))
        document["spec"] |= changes
        document["metadata"]["name"] = "chat"
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return str(path)

    return write


def test_a_roll_is_printed_step_by_step(changed, capsys):
    old, new = changed("old", replicas=2), changed("new", replicas=2, engine={"image": "rayloom/engine:2"})

    assert main(["plan", "--rollout", old, new]) == 0
    printed = capsys.readouterr().out
    first, _, *steps = printed.splitlines()
    before, after = first.split()[1], first.split()[3].rstrip(",")
    assert first.endswith("2 -> 2 replicas; at most 3 engines, at least 2 that serve.")
    assert [line[5:] for line in steps[:6]] == [
        f"Starting   make chat-{after}-0",
        f"Starting   chat-{after}-0 made its first token: send it requests",
        "Analyzing  for 60 s compare the requests of both revisions",
        f"Promoting  send chat-{before}-1 no more requests",
        f"Promoting  let chat-{before}-1 finish its requests, for at most 30 s",
        f"Promoting  delete chat-{before}-1",
    ]
    assert steps[-1].endswith(f"Complete   Every engine is of revision {after}.")


def test_the_document_shows_the_steps_that_are_printed(tmp_path, capsys):
    old, new = ROOT / "examples" / "smollm2-two-replicas.yaml", tmp_path / "new.yaml"
    new.write_text(old.read_text(encoding="utf-8").replace("float32", "bfloat16"), encoding="utf-8")

    assert main(["plan", "--rollout", str(old), str(new)]) == 0
    assert capsys.readouterr().out in (ROOT / "docs" / "rollouts.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("changes", [{"recovery": {"hangSeconds": 99}}, {"drainSeconds": 31}, {"replicas": 1}])
def test_a_change_that_recreates_no_engine_starts_no_rollout(changes, changed, capsys):
    assert main(["plan", "--rollout", changed("old"), changed("new", **changes)]) == 0
    assert capsys.readouterr().out.startswith("Nothing to do: both are revision ")


def test_the_steps_keep_to_the_settings_of_the_new_manifest():
    old, new = (make_resolved(replicas=2, image=image) for image in ("a", "b"))

    said = explain_rollout(old, new, Rollout.model_validate({"maxSurge": 0, "maxUnavailable": 1}))
    assert "2 -> 2 replicas; at most 2 engines, at least 1 that serve." in said
    assert re.findall(r"(?:make|delete) chat-\w+-\d", said)[0] == f"delete chat-{revision(old)}-1"


def test_a_suspended_service_has_no_engine_and_comes_back():
    one = make_resolved()
    spec = one.service.spec.model_copy(update={"replicas": 0})
    none = replace(one, service=one.service.model_copy(update={"spec": spec}))
    name = f"chat-{revision(one)}-0"

    assert re.findall(r"(make|delete) (\S+)", explain_rollout(one, none, Rollout())) == [("delete", name)]
    assert re.findall(r"(make|delete) (\S+)", explain_rollout(none, one, Rollout())) == [("make", name)]


def test_two_models_need_the_facts_of_both(facts, changed, tmp_path, capsys):
    def on_hub(name, source):
        return changed(name, model={"source": source}, accelerator={"memory": "80Gi", "perNode": 8}, parallelism={})

    old, new = on_hub("old", "hf://a/b"), on_hub("new", "hf://a/c")

    assert main(["plan", "--rollout", old, new, "--facts", facts]) == 2
    assert "inspect --model hf://a/b > facts.json` where it can be read, and add --old-facts" in capsys.readouterr().err
    assert main(["plan", "--rollout", old, new, "--facts", facts, "--old-facts", facts]) == 0
    assert "Analyzing" in capsys.readouterr().out
    assert main(["plan", "--rollout", old, old, "--facts", facts]) == 0
    assert main(["plan", "--rollout", changed("small"), new, "--facts", facts]) == 0


def test_manifests_that_are_no_change_of_one_service_are_refused(changed, capsys):
    assert main(["plan", "--rollout", changed("old"), str(SMALL)]) == 2
    assert "a rollout is a change of one" in capsys.readouterr().err
    assert main(["plan", "--rollout", changed("old"), changed("new"), "-o", "yaml"]) == 2
    assert "printed as text only" in capsys.readouterr().err


def test_a_model_whose_facts_are_unknown_is_to_be_inspected(tmp_path, capsys):
    assert plan_on_gpus(tmp_path, "hf://someone/else") == 2

    assert "inspect --model hf://someone/else > facts.json" in capsys.readouterr().err


def test_shipped_facts_are_those_of_the_backend_that_auto_takes(tmp_path, capsys):
    args = {"engine": {"args": {"modelBackend": "transformers"}}}
    assert plan_on_gpus(tmp_path, "hf://Qwen/Qwen3-8B", **args) == 2

    wanted = "inspect --model hf://Qwen/Qwen3-8B --model-backend transformers > facts.json"
    assert wanted in capsys.readouterr().err
    assert plan_on_gpus(tmp_path, "hf://deepseek-ai/DeepSeek-V2-Lite-Chat", **args) == 0


def plan_on_gpus(tmp_path, source, **spec):
    """Runs `plan` for a model on nodes of eight GPUs with 80 GiB each; returns the exit code."""
    document = yaml.safe_load((ROOT / "examples" / "qwen3-8b-gpu.yaml").read_text(encoding="utf-8"))
    document["spec"] = {"model": {"source": source}, "accelerator": {"memory": "80Gi", "perNode": 8}, **spec}
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return main(["plan", "-f", str(path)])


@pytest.mark.parametrize("model", [model for model in published_models().values() if model.refusal])
def test_a_published_model_that_the_engine_cannot_serve_is_refused_with_the_reason(model, tmp_path, capsys):
    assert plan_on_gpus(tmp_path, model.sources[-1]) == 2

    assert f"the engine cannot serve {model.sources[-1]}: {model.refusal}" in capsys.readouterr().err


def test_parameters_of_a_token_are_named_if_the_model_has_experts(tmp_path, capsys):
    assert plan_on_gpus(tmp_path, "hf://Qwen/Qwen3-30B-A3B") == 0

    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith(": 30.53 billion parameters, of which a token uses 3.35 billion, 56.9 GiB in bfloat16.")


def test_how_ranks_hold_a_quantised_checkpoint_is_named(tmp_path, capsys):
    source = "hf://hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4"
    assert plan_on_gpus(tmp_path, source) == 0
    on_gpus = capsys.readouterr().out.splitlines()[1]
    cpus = {"accelerator": None, "parallelism": {"tensor": 2}}
    assert plan_on_gpus(tmp_path, source, **cpus) == 0
    on_cpus = capsys.readouterr().out.splitlines()[1]

    stored = "The checkpoint has quantised weights (awq-int4-g128, 37.0 GiB); ranks on"
    assert on_gpus == f"{stored} accelerators hold them as float16."
    assert on_cpus == f"{stored} CPUs hold them as they are."


def test_the_output_of_a_failed_inspection_is_said_to_be_one(tmp_path, capsys):
    path = tmp_path / "facts.json"
    path.write_text("")
    assert main(["plan", "-f", str(EXAMPLE), "--facts", str(path)]) == 2
    assert f"--facts: {path} is empty, because `rayloom-engine inspect` failed; run it" in capsys.readouterr().err

    path.write_text(json.dumps({"version": "v2", "error": {"reason": "Unsupported", "message": "mamba keeps a state"}}))
    assert main(["plan", "-f", str(EXAMPLE), "--facts", str(path)]) == 2
    assert (
        f"--facts: {path} says that the engine cannot serve the model: mamba keeps a state" in capsys.readouterr().err
    )


def test_a_reader_that_has_read_enough_sees_no_traceback():
    read_end, write_end = os.pipe()
    os.close(read_end)  # as `head` does, before it has read all
    command = [sys.executable, "-m", "rayloom_operator", "plan", "-f", str(SMALL)]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60.0)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")
