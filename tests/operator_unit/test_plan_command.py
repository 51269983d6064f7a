"""`rayloom-operator plan`: what it prints of a manifest, and how it refuses one."""

from pathlib import Path

import pytest
import yaml

from rayloom_operator.__main__ import main
from rt_shapes import LLAMA31_70B

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "llama3-70b-tp8-pp2.yaml"
SMALL = ROOT / "examples" / "smollm2-tp3.yaml"


@pytest.fixture
def facts(tmp_path):
    path = tmp_path / "facts.json"
    path.write_text(LLAMA31_70B.model_dump_json(), encoding="utf-8")
    return str(path)


def test_the_table_marks_the_chosen_way_and_says_why_the_others_are_none(facts, capsys):
    assert main(["plan", "-f", str(EXAMPLE), "--facts", facts]) == 0
    lines = capsys.readouterr().out.splitlines()

    assert lines[0] == "hf://meta-llama/Llama-3.1-70B-Instruct: 70.55 billion parameters, 131.4 GiB in bfloat16."
    assert [line.split()[:2] for line in lines if line.startswith("->")] == [["->", "TP8xPP2"]]
    (one_node,) = [line for line in lines if "TP8xPP1" in line]
    assert one_node.endswith("16 x 131072 tokens need 80.0 GiB of KV cache on a rank, and there is room for 55.9 GiB")
    assert "TP8xPP2: tensor and pipeline as given. Worker pods: 2, ranks in each: 8." in lines


def test_the_document_shows_what_is_printed(facts, capsys):
    main(["plan", "-f", str(EXAMPLE), "--facts", facts])
    printed = capsys.readouterr().out.partition("\nObjects")[0]

    assert printed in (ROOT / "docs" / "sizing.md").read_text(encoding="utf-8")


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


def test_yaml_is_what_kubectl_takes_but_for_the_secrets_content(capsys):
    assert main(["plan", "-f", str(SMALL), "-o", "yaml"]) == 0
    objects = {each["kind"]: each for each in yaml.safe_load_all(capsys.readouterr().out)}

    assert objects["RayCluster"]["spec"]["workerGroupSpecs"][0]["rayStartParams"]["num-cpus"] == "3"
    assert "data" not in objects["Secret"]
    assert "config.json" in objects["ConfigMap"]["data"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([str(EXAMPLE)], "inspect --model hf://meta-llama/Llama-3.1-70B-Instruct > facts.json"),
        ([str(EXAMPLE), "--facts", "/not/there"], "cannot read /not/there: No such file"),
        (
            [str(EXAMPLE), "--facts", str(EXAMPLE)],
            "is not what `rayloom-engine inspect` prints: document: Invalid JSON",
        ),
    ],
)
def test_what_cannot_be_planned_ends_with_2_and_a_sentence(arguments, sentence, capsys):
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


def test_what_does_not_fit_ends_with_2_and_what_does(facts, tmp_path, capsys):
    document = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    document["spec"]["parallelism"] = {"tensor": 8, "pipeline": 1}
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")

    assert main(["plan", "-f", str(path), "--facts", facts]) == 2
    assert "spec.parallelism: TP8xPP1 does not fit" in (said := capsys.readouterr().err)
    assert said.rstrip().endswith("use tensor 8 and pipeline 2, which fit")
