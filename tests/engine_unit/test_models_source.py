"""Resolving the names of models. The hub is a server in the test; tests/engine_real tests builtin://."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayloom_engine.errors import ModelError
from rayloom_engine.models.checkpoint.hub import _progress_bar
from rayloom_engine.models.checkpoint.source import ResolvedModel, cache_folder, resolve
from rt_gguf import write_gguf
from rt_hub import COMMIT, serve_hub
from rt_tiny import tiny_variant


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_folder_is_used_as_it_is(prefix: str, tmp_path: Path) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    model = f"{prefix}{folder}"
    assert resolve(model) == ResolvedModel(path=folder, source=model, commit=None)


def test_a_gguf_file_is_converted_once(tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_variant(tmp_path / "original", "llama"))
    phases: list[str] = []
    first = resolve(str(path), progress=lambda phase, done, total, unit: phases.append(phase))
    assert "convert" in phases
    assert first.path.parent == own_cache and (first.path / "config.json").is_file()
    phases.clear()
    assert resolve(str(path), progress=lambda phase, done, total, unit: phases.append(phase)) == first
    assert set(phases) == {"resolve"}
    assert [entry.name for entry in own_cache.iterdir() if entry.is_dir()] == [first.path.name]

    write_gguf(path, tiny_variant(tmp_path / "other", "qwen2"))
    assert resolve(str(path)).path != first.path


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="is not a usable GGUF file"):
        resolve(str(path))
    assert [entry for entry in own_cache.iterdir() if entry.is_dir()] == []


def test_leftovers_of_a_killed_conversion_are_replaced(tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_variant(tmp_path / "original", "llama"))
    complete = resolve(str(path)).path
    partial = own_cache / f".{complete.name}.partial"
    complete.rename(partial)
    (partial / "model.safetensors").write_bytes(b"half")
    assert resolve(str(path)).path == complete
    assert (complete / "model.safetensors").stat().st_size > 100_000
    assert not partial.exists()


def test_two_processes_at_once_get_the_same_folder(tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_variant(tmp_path / "original", "llama"))
    script = "import sys; from rayloom_engine.models.checkpoint.source import resolve; print(resolve(sys.argv[1]).path)"
    processes = [
        subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    answers = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert answers[0] == answers[1] and Path(answers[0]).parent == own_cache


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("builtin://gpt-5", "no built-in model 'gpt-5'; there is: builtin://smollm2-135m"),
        ("/no/such/folder", "no such folder or .gguf file.*built in: builtin://smollm2-135m"),
        ("file:///no/such/folder", "no such folder or .gguf file"),
        ("no-such-file.gguf", "no such folder or .gguf file"),
        ("just-a-name", "a hub id is ORG/NAME"),
    ],
)
def test_models_that_do_not_exist_are_refused(model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve(model)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="is a file but not a"):
        resolve(str(tmp_path / "model.bin"))


def test_a_revision_of_a_local_folder_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    resolve(str(tmp_path), "main")
    assert "revision main has no effect" in caplog.text


def test_the_cache_follows_the_environment(tmp_path: Path) -> None:
    assert cache_folder({"RAYLOOM_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/rayloom")
    assert cache_folder({}) == Path.home() / ".cache" / "rayloom"


def test_a_name_is_resolved_without_torch_or_transformers(tmp_path: Path) -> None:
    script = (
        "import sys; from rayloom_engine.models.checkpoint.source import resolve;"
        "from rayloom_engine.models.shape import read_shape;"
        "read_shape(resolve(sys.argv[1]).path); assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)"
    )
    folder = tiny_variant(tmp_path, "llama")
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True, timeout=60)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


HUB_SCRIPT = """
import json, sys
from rayloom_engine.errors import ModelError
from rayloom_engine.models.checkpoint.source import resolve
told = []
answers = []
for model, revision in json.loads(sys.argv[1]):
    try:
        resolved = resolve(model, revision, lambda *now: told.append(now))
        answers.append([str(resolved.path), resolved.commit])
    except ModelError as error:
        answers.append(str(error))
print(json.dumps([answers, told]))
"""


def ask_hub(url: str, home: Path, *models: tuple[str, str | None], is_offline: bool = False) -> tuple[list, list]:
    """Resolves models in a process of its own, because the hub library reads its settings at its import."""
    environ = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1" if is_offline else "0"}
    done = subprocess.run(
        [sys.executable, "-c", HUB_SCRIPT, json.dumps(models)], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answers, told = json.loads(done.stdout)
    return answers, told


def test_a_hub_model_is_downloaded_and_then_found_without_a_network(tmp_path: Path) -> None:
    original = tiny_variant(tmp_path / "original", "llama")
    (original / "pytorch_model.bin").write_bytes(b"not wanted")
    with serve_hub("acme/tiny", original) as url:
        answers, told = ask_hub(url, tmp_path / "home", ("hf://acme/tiny", None), ("acme/tiny", COMMIT))
        (path, commit), second = answers
    assert commit == COMMIT and second == [path, COMMIT]
    names = {entry.name for entry in Path(path).iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    assert (Path(path) / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()
    assert ["resolve", 1, 1, "models"] in told and any(unit == "bytes" and done > 0 for _, done, _, unit in told)
    answers, _ = ask_hub("http://127.0.0.1:9", tmp_path / "home", ("hf://acme/tiny", None), is_offline=True)
    assert answers == [[path, COMMIT]]


def test_a_commit_that_is_no_longer_on_the_hub_is_found_in_the_cache(tmp_path: Path) -> None:
    removed = "f" * 40
    with serve_hub("acme/tiny", tiny_variant(tmp_path / "original", "llama")) as url:
        (answer,), _ = ask_hub(url, tmp_path / "home", ("acme/tiny", None))
        path = Path(answer[0]).rename(Path(answer[0]).with_name(removed))
        answers, _ = ask_hub(url, tmp_path / "home", ("acme/tiny", removed), ("acme/tiny", "e" * 40))
    assert answers[0] == [str(path), removed]
    assert "there is no such branch, tag or commit" in answers[1]


def test_mistrals_second_copy_of_the_weights_is_not_fetched(tmp_path: Path) -> None:
    original = tiny_variant(tmp_path / "original", "llama")
    (original / "consolidated.safetensors").write_bytes(b"the same again")
    seen: list[str] = []
    with serve_hub("acme/tiny", original, seen=seen) as url:
        ask_hub(url, tmp_path / "home", ("hf://acme/tiny", None))
    fetched = {request.rsplit("/", 1)[-1] for request in seen if "/resolve/" in request}
    assert "model.safetensors" in fetched and "consolidated.safetensors" not in fetched


def test_bytes_of_a_download_only_grow_although_the_library_counts_them_twice() -> None:
    told: list[tuple[str, int, int, str]] = []
    bar = _progress_bar(lambda *each: told.append(each))
    received, written, files = bar(unit="B", total=100), bar(unit="B", total=100), bar(unit="it", total=3)
    received.update(60)
    written.update(20)
    files.update(1)
    written.update(50)
    received.update(40)
    written.update(30)

    assert told == [("resolve", 60, 100, "bytes"), ("resolve", 70, 100, "bytes"), ("resolve", 100, 100, "bytes")]


def test_a_rank_that_needs_no_weights_downloads_none(tmp_path: Path) -> None:
    original = tiny_variant(tmp_path / "original", "llama")
    script = (
        "import sys; from rayloom_engine.models.checkpoint.source import resolve; "
        "resolve(sys.argv[1], has_weights=False)"
    )
    seen: list[str] = []
    with serve_hub("acme/tiny", original, seen=seen) as url:
        environ = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        subprocess.run([sys.executable, "-c", script, "hf://acme/tiny"], env=environ, check=True, timeout=120)
    fetched = {request.rsplit("/", 1)[-1] for request in seen if "/resolve/" in request}
    assert fetched == {"config.json", "generation_config.json"}


def test_a_refusal_of_the_hub_is_explained(tmp_path: Path) -> None:
    with serve_hub("acme/tiny", tmp_path) as url:
        answers, _ = ask_hub(url, tmp_path / "home", ("acme/none", None), ("gated/model", None), ("acme/tiny", "nope"))
    for answer, message in zip(
        answers,
        ("does not exist on the hub, or is private", "set HF_TOKEN", "no such branch, tag or commit"),
        strict=True,
    ):
        assert message in answer
    answers, _ = ask_hub(url, tmp_path / "home", ("acme/tiny", None), is_offline=True)
    assert "is not in the local hub cache and the hub cannot be reached" in answers[0]
