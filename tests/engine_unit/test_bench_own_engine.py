"""`rayloom-engine bench` with a real engine of its own, on a tiny checkpoint. Figures are not asserted."""

import json
import subprocess
import sys
from pathlib import Path

import psutil

from rt_tiny import tiny_checkpoint, tiny_tokenizer


def test_own_engine_is_started_twice_measured_and_stopped(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", max_position_embeddings=512)
    tiny_tokenizer(folder)
    file = tmp_path / "bench.json"
    flags = ["--model", str(folder), "--workloads", "W3", "--scale", "0.1", "--no-limit", "--threads", "1"]
    command = [
        sys.executable,
        "-m",
        "rayloom_engine",
        "bench",
        *flags,
        "--json",
        str(file),
        "--",
        "--max-num-seqs",
        "2",
    ]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    written = json.loads(file.read_text())
    assert written["start_up"]["second_s"] > 0
    assert written["memory"]["after"] == "W3"
    roles = sorted(name.split()[0] for name in written["memory"]["pss_bytes"])
    assert roles == ["rayloom_engine", "rayloom_engine.core_server.process", "rayloom_engine.front"]
    (engine,) = written["workloads"][0]["engines"]
    assert (engine["engine"], engine["prompt_tokens"], engine["output_tokens"]) == ("rayloom fp32", 128, 128)
    assert "start to first token: " in finished.stdout
    assert not [name for name in written["memory"]["pss_bytes"] if psutil.pid_exists(int(name.split()[1]))]
