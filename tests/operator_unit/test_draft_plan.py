"""The draft model in the output of `rayloom-operator plan`, and the facts that `plan` needs for it."""

import json

import pytest
import yaml

from rayloom_operator.__main__ import main
from rayloom_operator.api import shipped_facts as shipped
from rt_operator import make_service
from rt_shapes import SMOLLM2

SOURCE = "builtin://smollm2-135m"
OWN = {"source": SOURCE, "draft": {"source": SOURCE}}


def with_draft(facts):
    return facts.model_copy(update={"draft": SMOLLM2.as_draft()})


def planned(tmp_path, capsys, *flags, **model):
    path = tmp_path / "service.yaml"
    document = {
        "apiVersion": "rayloom.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "chat"},
        "spec": {"model": model},
    }
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    code = main(["plan", "-f", str(path), *flags])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_plan_prints_what_the_draft_model_takes(tmp_path, capsys):
    code, output = planned(tmp_path, capsys, source="hf://Qwen/Qwen3-8B", draft={"source": "hf://Qwen/Qwen3-0.6B"})

    # 596,049,920 x 2 bytes. A token of the KV cache has 2 x 28 layers x 8 heads x 128 x 2 bytes of the draft model and
    # 2 x 36 x 8 x 128 x 2 bytes of the model. 4 GiB hold 16,384 tokens, with 112 KiB of each for the draft model.
    assert code == 0
    assert (
        "Draft model hf://Qwen/Qwen3-0.6B: 0.60 billion parameters. The rank that samples holds all of it: 1.1 GiB of "
        "weights, and 1.8 GiB for its part of the KV cache."
    ) in output


def test_plan_names_the_command_that_finds_the_facts_of_a_draft_model(tmp_path, capsys):
    code, output = planned(tmp_path, capsys, source="hf://Qwen/Qwen3-8B", draft={"source": "pvc://drafts/d"})

    assert code != 0
    assert (
        "run `rayloom-engine inspect --model hf://Qwen/Qwen3-8B --draft-model DRAFT_FOLDER/d > facts.json` where it "
        "can be read, and the claim drafts is mounted at DRAFT_FOLDER, and add --facts facts.json"
    ) in output


def test_plan_says_that_it_does_not_compare_the_tokenizers(tmp_path, capsys):
    unchecked = "The tokenizers of the two models are not compared here; the inspection compares them."
    larger = "hf://Qwen/Qwen3-8B"

    _, alike = planned(tmp_path, capsys, source=larger, draft={"source": "hf://Qwen/Qwen3-0.6B"})
    _, other = planned(tmp_path, capsys, source=larger, draft={"source": SOURCE})
    _, same = planned(tmp_path, capsys, **OWN)
    facts = tmp_path / "facts.json"
    facts.write_text(with_draft(SMOLLM2).model_dump_json(exclude_none=True))
    _, inspected = planned(tmp_path, capsys, "--facts", str(facts), source=SOURCE, draft={"source": "hf://acme/draft"})

    assert f"{unchecked}\n" in alike
    assert f"{unchecked} The model's vocabulary has 151936 rows, and the draft model's has 49152.\n" in other
    assert "not compared" not in same + inspected


@pytest.mark.parametrize(
    ("model", "draft", "seen"),
    [(1024, None, "all positions"), (1024, 1025, "1025 positions"), (1024, 1024, None), (None, 8, None)],
)
def test_plan_refuses_a_draft_model_that_sees_more_than_the_model(model, draft, seen, tmp_path, capsys, monkeypatch):
    def with_windows(span):
        costs = SMOLLM2.costs.model_copy(update={"attention_span": span})
        return SMOLLM2.model_copy(update={"costs": costs})

    known = {"hf://acme/m": with_windows(model), "hf://acme/d": with_windows(draft)}
    monkeypatch.setattr(shipped, "shipped_facts", lambda: known)
    code, output = planned(tmp_path, capsys, source="hf://acme/m", draft={"source": "hf://acme/d"})

    sentence = f"the draft model attends to {seen}, and the model to 1024; use one whose sliding windows are not wider"
    refusal = f"spec.model.draft.source: the engine refuses hf://acme/d: {sentence}"
    assert (code, refusal in output) == ((0, False) if seen is None else (2, True))


def test_the_facts_of_a_rollout_serve_both_manifests_only_with_the_same_draft_model(tmp_path, capsys):
    facts = tmp_path / "facts.json"

    def rolled(old, new, *flags):
        found = []
        for name, draft in (("old", old), ("new", new)):
            document = make_service(model={"source": "hf://acme/m", **({"draft": {"source": draft}} if draft else {})})
            (path := tmp_path / f"{name}.yaml").write_text(
                yaml.safe_dump(
                    json.loads(document.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True))
                )
            )
            found.append(str(path))
        facts.write_text((with_draft(SMOLLM2) if new else SMOLLM2).model_dump_json(exclude_none=True))
        code = main(["plan", "--rollout", *found, "--facts", str(facts), *flags])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    command = "inspect --model hf://acme/m --draft-model hf://acme/a > facts.json` where it can be read"
    assert rolled("hf://acme/a", "hf://acme/a")[0] == rolled(None, "hf://acme/a")[0] == 0
    for new in ("hf://acme/b", None):
        code, output = rolled("hf://acme/a", new)
        assert (code, f"{command}, and add --old-facts facts.json" in output) == (2, True)
    code, output = rolled("hf://acme/a", None, "--old-facts", str(facts))
    assert (code, f"--old-facts: {facts} does not have the facts of the draft model hf://acme/a" in output) == (2, True)
