from pathlib import Path

import pytest

from rayloom_operator.api.manifest import load_service
from rayloom_operator.errors import SpecError

SERVICE = """
apiVersion: rayloom.dev/v1alpha1
kind: LLMService
metadata: {name: chat}
spec: {model: {source: "builtin://smollm2-135m"}}
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads text as the file x.yaml of the working directory."""
    monkeypatch.chdir(tmp_path)

    def load_text(text):
        path = Path("x.yaml")
        path.write_text(text, encoding="utf-8")
        return load_service(path)

    return load_text


@pytest.fixture
def problems_of(load):
    def problems(text):
        with pytest.raises(SpecError) as caught:
            load(text)
        return caught.value.problems

    return problems


def test_empty_documents_around_the_service_are_ignored(load):
    assert load(f"---\n---\n{SERVICE}\n---\n# nothing\n").metadata.name == "chat"


def test_several_documents_are_refused_with_their_kinds(problems_of):
    assert problems_of(f"{SERVICE}---\nkind: Secret\n---\n- 1\n") == (
        "x.yaml holds 3 documents (LLMService, Secret, no kind); keep exactly one LLMService and remove the others",
    )


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n---\n"])
def test_an_empty_file_is_refused(problems_of, text):
    assert problems_of(text) == ("x.yaml is empty; it must hold one LLMService",)


def test_broken_yaml_is_refused_with_its_place(problems_of):
    (problem,) = problems_of("spec: {model: [}")

    assert problem.startswith("x.yaml is not YAML: ")
    assert "line 1, column 16" in problem


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(SpecError) as caught:
        load_service(tmp_path / "none.yaml")

    assert caught.value.problems == (f"cannot read {tmp_path / 'none.yaml'}: No such file or directory",)


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "latin1.yaml"
    path.write_bytes(b"# caf\xe9\n")

    with pytest.raises(SpecError) as caught:
        load_service(path)

    assert caught.value.problems == (f"{path} is not UTF-8 text: invalid continuation byte at byte 5",)


@pytest.mark.parametrize("time", ["2026-11-24T08:00:00Z", "2026-11-24T08:00:00+01:00"])
def test_a_time_without_quotes_stays_text(load, time):
    text = SERVICE.replace("spec: {", f"spec: {{restartedAt: {time}, ")

    assert load(text).spec.restarted_at == time


def test_a_time_that_is_not_on_the_calendar_is_refused(problems_of):
    (problem,) = problems_of(SERVICE.replace("spec: {", "spec: {restartedAt: 2026-13-01T00:00:00Z, "))

    assert problem.startswith("spec.restartedAt: '2026-13-01T00:00:00Z' is not a time; use a time such as ")


def test_kinds_that_are_no_text_are_named_too(problems_of):
    assert problems_of(f"{SERVICE}---\nkind: 5\n") == (
        "x.yaml holds 2 documents (LLMService, 5); keep exactly one LLMService and remove the others",
    )


@pytest.mark.parametrize("text", ["12:30", "12:30:45", "1:30.5"])
def test_numbers_with_colons_are_text_as_for_kubectl(load, text):
    loaded = load(
        SERVICE.replace("spec: {", f"spec: {{drainSeconds: 7, engine: {{env: [{{name: A, value: {text}}}]}}, ")
    )

    assert (loaded.spec.engine.env[0].value, loaded.spec.drain_seconds) == (text, 7)
