"""The peers of the bench: each is installed once, and the commands use all cores and the same weights.

No peer is installed here, because an installation takes minutes and gigabytes. `make bench-peers` installs them.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st

from rayloom_bench.client import RequestOptions, completion_body
from rayloom_bench.peers.engines import llama_cpp, vllm_cpu
from rayloom_bench.peers.engines.contestants import LLAMA_SWEEPS
from rayloom_bench.peers.engines.gguf_weights import builtin_file, rounded_to_bfloat16
from rayloom_bench.peers.engines.gguf_weights import write_gguf as write_weights
from rayloom_bench.peers.engines.installation import PeerMissing, installed, peers_folder, run_step
from rayloom_bench.peers.engines.shown_command import shown
from rayloom_bench.peers.engines.vllm_cpu import requirements_without_torch, write_stub
from rayloom_bench.peers.names import parse_engines
from rayloom_bench.peers.workloads import COMPARED, JSON_W1
from rayloom_bench.workload import LONG_ARRAY
from rayloom_engine.errors import ConfigError
from rayloom_engine.models.checkpoint.gguf_convert import convert_gguf
from rt_gguf import write_gguf
from rt_tiny import tiny_variant


def silent(line: str) -> None:
    """A log that nobody reads."""


def test_peers_are_in_the_cache_outside_of_the_checkout() -> None:
    assert peers_folder({"RAYLOOM_CACHE": "/cache"}) == Path("/cache/peers")


def test_a_peer_is_installed_once(tmp_path: Path) -> None:
    calls = []

    def install(folder: Path) -> None:
        calls.append(folder)
        (folder / "peer").write_text("binary")

    for _ in range(2):
        assert installed(tmp_path / "peer-1", install, what="a peer", log=silent) == tmp_path / "peer-1"
    assert calls == [tmp_path / "peer-1"]
    installed(tmp_path / "peer-2", install, what="a peer", log=silent)
    assert calls == [tmp_path / "peer-1", tmp_path / "peer-2"], "other pins are another folder"


def test_an_installation_that_failed_begins_again_from_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "peer"

    def fails(target: Path) -> None:
        (target / "half").write_text("")
        run_step(["false"], log=silent)

    with pytest.raises(PeerMissing, match="false ended with exit code 1"):
        installed(folder, fails, what="a peer", log=silent)
    installed(folder, lambda target: (target / "whole").touch(), what="a peer", log=silent)
    assert sorted(path.name for path in folder.iterdir()) == ["installed", "whole"]


def test_a_failed_step_is_reported_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(PeerMissing, match=r"exit code 3:\nno space\nleft"):
        run_step(["bash", "-c", "echo no space; echo left >&2; exit 3"], log=silent)
    with pytest.raises(PeerMissing, match="no-such-tool cannot be run"):
        run_step([tmp_path / "no-such-tool"], log=silent)
    assert run_step(["pwd"], folder=tmp_path, log=silent).strip() == str(tmp_path.resolve())


def test_requirements_leave_torch_and_extras_out() -> None:
    lines = [
        "torch==2.13.0+cpu",
        "torchvision==0.28; platform_machine == 'x86_64'",
        "torchaudio",
        "triton>=3",
        "transformers<6,>=5.5.3",
        "torch-geometry-of-others>=1",
        'numba==0.65; python_version < "3.14"',
        'pytest>=8; extra == "test"',
        'tensorizer==2.10; extra=="tensorizer"',
        "llguidance[fast]>=1.3",
    ]
    assert requirements_without_torch(lines) == [
        "transformers<6,>=5.5.3",
        "torch-geometry-of-others>=1",
        'numba==0.65; python_version < "3.14"',
        "llguidance[fast]>=1.3",
    ]
    with pytest.raises(ValueError, match="without a name"):
        requirements_without_torch([""])


@given(st.lists(st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,5})?", fullmatch=True)))
def test_no_requirement_but_torchs_is_lost(names: list[str]) -> None:
    others = [name for name in names if name not in ("torch", "torchvision", "torchaudio", "triton")]
    assert requirements_without_torch([f"{name}>=1" for name in names]) == [f"{name}>=1" for name in others]


def test_the_stub_says_that_vllm_is_built_for_cpus(tmp_path: Path) -> None:
    write_stub(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    assert (found.metadata["Name"], found.version) == ("vllm", f"{vllm_cpu.VERSION}+cpu")


def test_vllm_gets_all_cores_and_both_libraries() -> None:
    environ = {"PATH": "/bin", "HOME": "/h", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "40", "PYTHONPATH": "/x"}
    environment = vllm_cpu.environment(Path("/p"), (0, 1), environ)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert environment["LD_PRELOAD"] == "/p/lib/libtcmalloc_minimal.so.4:/p/lib/libiomp5.so"
    assert environment["HOME"] == "/h"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == str(vllm_cpu.KV_CACHE_GIB)
    assert not {"OMP_NUM_THREADS", "PYTHONPATH"} & environment.keys()


def test_vllm_serves_bfloat16_with_room_for_the_longest_workload() -> None:
    command = vllm_cpu.command(Path("/p"), Path("/models/m"), port=7)
    assert command[:3] == ["/p/venv/bin/vllm", "serve", "/models/m"]
    flags = dict(zip(command[3::2], command[4::2], strict=True))
    assert (flags["--dtype"], flags["--port"]) == ("bfloat16", "7")
    assert int(flags["--max-model-len"]) >= 2048 + 32
    assert flags["--generation-config"] == "vllm", "or the model's own sampling defaults apply"


def test_llama_server_has_a_slot_for_each_user_of_w1() -> None:
    command = llama_cpp.command(Path("/p"), Path("/w/model-bf16.gguf"), num_threads=2, port=7)
    assert command[0] == "/p/build/bin/llama-server"
    flags = dict(zip(command[1::2], command[2::2], strict=True))
    assert flags == {
        "-m": "/w/model-bf16.gguf",
        "--host": "127.0.0.1",
        "--port": "7",
        "-t": "2",
        "-np": "16",
        "-c": "36864",
    }
    assert max(each.num_prompt + each.num_output for each in COMPARED) <= llama_cpp.SLOT_TOKENS
    assert max(each.concurrency for each in COMPARED) <= llama_cpp.NUM_SLOTS
    assert llama_cpp.environment({"OMP_NUM_THREADS": "1", "HOME": "/h"}) == {"HOME": "/h"}


def test_a_greedy_request_to_llama_cpp_sorts_no_vocabulary_and_a_sampled_one_has_no_other_filter() -> None:
    greedy, sampled = COMPARED[:2]
    assert llama_cpp.sampling_fields(greedy) == {"samplers": ["top_k"], "top_k": 1}
    assert llama_cpp.sampling_fields(sampled) == {"samplers": ["temperature", "top_p"]}


def test_json_answers_are_asked_of_llama_cpp_in_its_own_field() -> None:
    fields = llama_cpp.sampling_fields(JSON_W1)
    assert fields == {"samplers": ["top_k"], "top_k": 1, "json_schema": LONG_ARRAY}
    body = completion_body("m", (1, 2), JSON_W1, RequestOptions(extra_fields=fields))
    assert body["response_format"]["json_schema"]["schema"] == body["json_schema"]
    assert LLAMA_SWEEPS == ("D1", "D2", "D4", "D8", "D16", "P128", "P512", "P2048")


def test_shown_commands_name_no_place_of_this_machine() -> None:
    command = ["/cache/peers/venv/bin/vllm", "serve", "/home/u/m", "--host", "127.0.0.1", "--port", "81", "--x", "a b"]
    assert shown(command) == "vllm serve m --x 'a b'"


def test_engines_are_chosen_by_name_in_the_order_of_the_tables() -> None:
    assert parse_engines("vllm, rayloom") == ("rayloom", "vllm")
    for names in ("", ",", "sglang", "vllm,sglang"):
        with pytest.raises(ConfigError, match=re.escape("llama.cpp-bf16")):
            parse_engines(names)


@pytest.mark.parametrize(("kind", "matrix"), [("bf16", "BF16"), ("f16", "F16")])
def test_the_weights_for_llama_cpp_are_those_of_our_checkpoint(kind: str, matrix: str, tmp_path: Path) -> None:
    checkpoint = tiny_variant(tmp_path / "original", "llama-tied")
    source = tmp_path / "model.gguf"
    write_gguf(source, checkpoint, kind=gguf.GGMLQuantizationType.Q4_1)
    write_weights(source, tmp_path / "same.gguf", kind)
    written = gguf.GGUFReader(tmp_path / "same.gguf")
    kinds = {len(tensor.shape): tensor.tensor_type.name for tensor in written.tensors}
    assert kinds == {1: "F32", 2: matrix}
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    convert_gguf(source, tmp_path / "ours")
    write_weights(tmp_path / "same.gguf", tmp_path / "again.gguf", "bf16")
    convert_gguf(tmp_path / "again.gguf", tmp_path / "theirs")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name


@given(
    numpy_st.arrays(
        np.float32, st.tuples(st.integers(1, 3), st.integers(1, 8)), elements=st.floats(-(2.0**100), 2.0**100, width=32)
    )
)
def test_rounding_to_bfloat16_is_exact_where_it_can_be_and_near_elsewhere(values: np.ndarray) -> None:
    rounded = rounded_to_bfloat16(values)
    assert (rounded_to_bfloat16(rounded) == rounded).all()
    assert (np.abs(rounded - values) <= np.abs(values) / 256 + 1e-38).all()


def test_the_package_of_the_builtin_model_has_one_file() -> None:
    assert builtin_file().suffix == ".gguf"
