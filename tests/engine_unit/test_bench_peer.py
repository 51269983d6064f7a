"""transformers as a peer, in its own process, on a tiny checkpoint."""

from pathlib import Path

from rayloom_bench.peer import run_transformers
from rayloom_bench.workload import Workload, token_prompts
from rt_tiny import tiny_checkpoint


def test_peer_answers_every_request_in_static_batches(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", "LlamaForCausalLM")
    workload = Workload(name="S", num_requests=5, concurrency=2, num_own=7, num_output=4)
    prompts = token_prompts(workload, seed=0, vocab_size=256)
    done = []
    result = run_transformers(folder, "float32", [(workload, prompts)], threads=1, on_progress=done.append)
    records = result.records["S"]
    assert done == [2, 4, 5]
    assert [(r.index, r.num_prompt, r.num_output) for r in records] == [(i, 7, 4) for i in range(5)]
    assert [r.start_s for r in records[:2]] == [records[0].start_s] * 2
    assert records[0].end_s <= records[2].start_s and records[2].end_s <= records[4].start_s
    assert result.pss_bytes["S"] > 0
