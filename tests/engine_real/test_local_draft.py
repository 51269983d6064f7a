"""`rayloom-operator local` serves a manifest with a draft model: drafts are accepted, both KV caches are counted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from rayloom_operator.api.manifest import load_service
from rayloom_operator.api.shipped_facts import builtin_facts
from rayloom_operator.resolve.resolved import resolve
from rt_server import wait_until

# 128 blocks. One block has 368,640 bytes of the model in bfloat16, and as many of the draft model.
KV_BYTES = 128 * 2 * 368_640
MANIFEST = f"""\
apiVersion: rayloom.dev/v1alpha1
kind: LLMService
metadata:
  name: drafted
spec:
  model:
    source: builtin://smollm2-135m
    dtype: bfloat16
    maxModelLen: 512
    draft:
      source: builtin://smollm2-135m
      quantization: int8
  engine:
    args:
      threads: 1
      kvCacheMemoryBytes: {KV_BYTES}
"""
REQUEST = {
    "model": "drafted",
    "messages": [{"role": "user", "content": "Tell me about the history of Rome."}],
    "temperature": 0,
    "max_tokens": 64,
}


def _metric(text: str, name: str) -> float:
    (value,) = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return float(value)


def test_a_model_drafts_for_itself_and_the_operator_counts_the_blocks_that_the_engine_allocates(tmp_path: Path) -> None:
    manifest = tmp_path / "drafted.yaml"
    manifest.write_text(MANIFEST)
    output = tmp_path / "output"
    command = [sys.executable, "-m", "rayloom_operator", "local", "-f", str(manifest), "--no-sample"]
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "--port", "0", "--admin-port", "0"],
            stdout=stream,
            stderr=stream,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    try:
        wait_until(
            lambda: "Press Ctrl-C to stop." in output.read_text() or process.poll() is not None, 120.0, output.read_text
        )
        assert process.poll() is None, output.read_text()
        url = output.read_text().split("URL:")[1].split()[0]
        with httpx.Client(timeout=60.0) as client:
            answer = client.post(f"{url}/chat/completions", json=REQUEST).json()
            metrics = client.get(f"{url.removesuffix('/v1')}/metrics").text
        process.send_signal(signal.SIGINT)
        assert process.wait(60.0) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    assert answer["usage"]["completion_tokens"] > 16
    assert _metric(metrics, "rayloom:spec_decode_num_accepted_tokens_total") > 0
    service = load_service(manifest)
    sizing = resolve(service, "", builtin_facts(service.spec.model)).sizing
    assert sizing is not None
    assert sizing.kv_tokens == 128 * 16
    assert 'num_gpu_blocks="128"' in metrics
    assert "Draft:  builtin://smollm2-135m\n" in output.read_text()
