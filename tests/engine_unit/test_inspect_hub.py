"""`rayloom-engine inspect` and the hub: the files that it reads, its termination messages, each refusal of the hub."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from rayloom_engine.errors import ModelError
from rayloom_engine.models.inspection import failure, inspect_model
from rt_gguf import write_gguf
from rt_hub import COMMIT, serve_hub
from rt_tiny import tiny_variant
from rt_warm_python import warm_python

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of two files. The weights are missing, because `inspect` must not read them."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "model-00001-of-00001.safetensors").write_bytes(b"not to be read")
    return folder


# Imports of `inspect`. The hub library is not among them, because it reads settings at its import.
MODULES = (
    "rayloom_engine.cli.commands",
    "rayloom_engine.models.inspection",
    "rayloom_engine.models.on_transformers.child",
    "filelock",
    "httpx2",
    "tqdm",
)


def run_inspect(model, home, url="", *flags, **environ):
    """(exit code, termination message, stderr) of a process that has not imported the hub library."""
    words = home / "words"
    own = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "RAYLOOM_TERMINATION_LOG": str(words)}
    with (home / "stderr").open("w+") as stderr:
        process = warm_python(*MODULES).start(
            "rayloom_engine.__main__:main",
            ["inspect", "--model", model, *flags],
            environment={**os.environ, **own, **environ},
            stdout=stderr.fileno(),
            stderr=stderr.fileno(),
        )
        code = process.wait(120)
        stderr.seek(0)
        return code, json.loads(words.read_text()), stderr.read()


def test_a_models_facts_come_from_its_configuration_alone(model, tmp_path):
    seen = []
    with serve_hub("acme/tiny", model, seen=seen) as url:
        code, words, _ = run_inspect("hf://acme/tiny", tmp_path, url)

    # The embedding and the head have 32 x 8 parameters each, and the last norm has 8. In a layer, q and o have 8 x 8
    # each, k and v have 8 x 4 each, the feed-forward has 3 x 8 x 16, and two norms have 8 each.
    assert words["num_parameters"] == 2 * 32 * 8 + 8 + 2 * (2 * 64 + 2 * 32 + 3 * 128 + 16)
    assert (code, words["version"], words["commit"]) == (0, "v2", COMMIT)
    assert (words["shape"]["num_layers"], words["shape"]["checkpoint_dtype"]) == (2, "bfloat16")
    assert {request.rsplit("/", 1)[-1] for request in seen if "resolve" in request} == {"config.json"}


def test_of_a_model_and_its_draft_model_the_configurations_and_tokenizers_are_fetched(model, tmp_path):
    tokenizer = json.dumps({"model": {"vocab": {"a": 0, "b": 1}}})
    large, small = (shutil.copytree(model, tmp_path / name) for name in ("large", "small"))
    (large / "tokenizer.json").write_text(tokenizer)
    (small / "tokenizer.json").write_text(tokenizer.replace("0", "2"))
    seen = []
    with serve_hub("acme/large", large, others={"acme/small": small}, seen=seen) as url:
        flags = ["--draft-model", "hf://acme/small", "--draft-revision", COMMIT]
        refused, words, _ = run_inspect("hf://acme/large", tmp_path, url, *flags)
        (small / "tokenizer.json").write_text(tokenizer)
        (other := tmp_path / "other").mkdir()
        accepted, found, _ = run_inspect("hf://acme/large", other, url, *flags)

    assert (refused, words["error"]["reason"], accepted) == (78, "Unsupported", 0)
    sentence = "hf://acme/small has another tokenizer than the model: 1 of the model's 2 tokens"
    assert sentence in words["error"]["message"]
    assert (found["commit"], found["draft"]["commit"]) == (COMMIT, COMMIT)
    fetched = {request.rsplit("/", 1)[-1] for request in seen if "resolve" in request}
    assert fetched == {"config.json", "tokenizer.json"}


def test_a_hub_that_is_slow_with_the_draft_model_is_not_blamed_on_the_model(model, tmp_path):
    with serve_hub("acme/tiny", model) as url:
        flags = ["--draft-model", "hf://slow/model", "--timeout", "3"]
        code, words, stderr = run_inspect(str(model), tmp_path, url, *flags)

    assert (code, words["error"]["reason"]) == (78, "Unreachable")
    assert words["error"]["message"].startswith("draft_model: hf://slow/model: no answer within 3 s; check the network")
    assert words["error"]["message"] in stderr


def test_a_token_opens_a_private_model(model, tmp_path):
    with serve_hub("acme/tiny", model, token="hf_right") as url:
        code, words, _ = run_inspect("hf://acme/tiny", tmp_path, url, HF_TOKEN="hf_right")

    assert (code, words["commit"]) == (0, COMMIT)


REFUSALS = [
    ("acme/none", {}, "NotFound", "does not exist on the hub"),
    ("gated/model", {}, "Gated", "accept its terms"),
    ("forbidden/model", {}, "NoAccess", "refuses access"),
    ("broken/model", {}, "Unreachable", "the hub cannot be reached"),
    ("slow/model", {}, "Unreachable", "no answer within 3 s"),
]


@pytest.fixture(scope="module")
def refused(model, tmp_path_factory):
    """Results of `inspect` for each of REFUSALS, and for a private model without a token and with a wrong token."""
    with serve_hub("acme/tiny", model) as url, serve_hub("acme/tiny", model, token="hf_right") as private:
        asked = [(name, environ, url) for name, environ, _, _ in REFUSALS]
        asked += [("acme/tiny", {"HF_TOKEN": token}, private) for token in ("", "hf_wrong")]

        def ask(one):
            name, environ, at = one
            home = tmp_path_factory.mktemp("home")
            return run_inspect(f"hf://{name}", home, at, "--timeout", "3" if "slow" in name else "60", **environ)

        with ThreadPoolExecutor(2) as pool:
            yield dict(
                zip([(name, environ.get("HF_TOKEN")) for name, environ, _ in asked], pool.map(ask, asked), strict=True)
            )


@pytest.mark.parametrize(("name", "environ", "reason", "sentence"), REFUSALS, ids=[each[0] for each in REFUSALS])
def test_each_refusal_has_its_own_reason(refused, name, environ, reason, sentence):
    code, words, stderr = refused[name, None]

    assert (code, words["error"]["reason"]) == (78, reason)
    assert sentence in words["error"]["message"]
    assert words["error"]["message"] in stderr


def test_the_sentence_about_a_broken_hub_is_the_same_each_time(refused):
    _, words, _ = refused["broken/model", None]

    assert "503" in words["error"]["message"] and "Request ID" not in words["error"]["message"]


def test_a_missing_and_a_wrong_token_are_distinguished(refused):
    (_, missing, _), (_, wrong, _) = refused["acme/tiny", ""], refused["acme/tiny", "hf_wrong"]

    assert {missing["error"]["reason"], wrong["error"]["reason"]} == {"NoAccess"}
    assert "or is private" in missing["error"]["message"]
    assert "wrong or has expired" in wrong["error"]["message"]


def test_a_revision_that_is_not_there_is_not_found(model, tmp_path):
    with serve_hub("acme/tiny", model) as url:
        code, words, _ = run_inspect("hf://acme/tiny", tmp_path, url, "--revision", "nope")

    assert (code, words["error"]["reason"]) == (78, "NotFound")


def test_a_mirror_is_trusted_by_its_own_certificate(model, tmp_path):
    certificate, key = tmp_path / "ca.crt", tmp_path / "key"
    subject = ["-subj", "/CN=hub", "-addext", "subjectAltName=IP:127.0.0.1"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*make, "-out", certificate, "-keyout", key], check=True, capture_output=True, timeout=60)
    with serve_hub("acme/tiny", model, tls=(certificate, key)) as url:
        trusted, _, _ = run_inspect("hf://acme/tiny", tmp_path, url, SSL_CERT_FILE=str(certificate))
        (other := tmp_path / "other").mkdir()
        distrusted, words, _ = run_inspect("hf://acme/tiny", other, url)

    assert (trusted, distrusted, words["error"]["reason"]) == (0, 78, "Unreachable")
    assert "certificate" in words["error"]["message"].lower()


def test_two_processes_that_share_a_cache_fetch_each_file_once(model, tmp_path):
    script = "import sys; from rayloom_engine.models.checkpoint.source import resolve; print(resolve(sys.argv[1]).path)"
    seen = []
    with serve_hub("acme/tiny", model, seen=seen) as url:
        environ = {**os.environ, "HF_ENDPOINT": url, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        start = [sys.executable, "-c", script, "hf://acme/tiny"]
        running = [subprocess.Popen(start, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        answers = {each.communicate(timeout=120)[0].strip() for each in running}

    (folder,) = answers
    assert sorted(os.listdir(folder)) == sorted(path.name for path in model.iterdir())
    assert len([each for each in seen if each.startswith("GET") and each.endswith(".safetensors")]) == 1


def test_the_fault_of_a_gguf_file_names_that_file(tmp_path):
    checkpoint = tiny_variant(tmp_path / "original", "llama")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 3}))
    write_gguf(tmp_path / "tiny.gguf", checkpoint)
    texts = set()
    for _ in range(2):
        with pytest.raises(ModelError) as caught:
            inspect_model(f"{tmp_path}/tiny.gguf", None)
        texts.add(str(caught.value))

    (text,) = texts
    assert text.startswith(f"{tmp_path}/tiny.gguf: num_attention_heads")


def test_a_gguf_file_is_inspected_without_being_converted(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny_variant(tmp_path / "original", "llama"))
    environ = {"RAYLOOM_CACHE": str(tmp_path / "cache")}
    code, words, _ = run_inspect(f"file://{tmp_path}/tiny.gguf", tmp_path, **environ)

    assert (code, words["shape"]["architecture"], words["shape"]["num_layers"]) == (0, "LlamaForCausalLM", 2)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({}, "NotFound"),
        ({"a.safetensors": "x"}, "NotFound"),
        ({"a.safetensors": "x", "config.json": "{"}, "Invalid"),
        ({"a.safetensors": "x", "config.json": '{"architectures": ["GPT2LMHeadModel"]}'}, "Unsupported"),
    ],
)
def test_the_fault_of_a_folder_has_a_reason(tmp_path, files, fault):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError) as caught:
        inspect_model(f"file://{tmp_path}", None)

    assert caught.value.fault == fault


@pytest.mark.parametrize("character", ["\N{GRINNING FACE}", "\x01", '"', "\udcff"])
def test_last_words_fit_where_kubernetes_keeps_them(character):
    words = failure(ModelError(character * 5000)).text()

    assert len(words.encode()) < 4096
