"""The /status document from a CoreStatus: all of its fields, without the ranks and batches of a lost core."""

from __future__ import annotations

import msgspec

from rayloom_engine import status
from rayloom_engine.config import BLOCK_SIZE, parse_config
from rayloom_engine.core.stats import SchedulerStats
from rayloom_engine.front.core_link.recoveries import RecoveryRecord
from rayloom_engine.front.operations.status_document import NO_CORE, FrontFigures, ReceivedStatus, status_document
from rayloom_engine.protocol.messages import PhaseProgress, RankReport, ServedModel

CONFIG = parse_config({"model": "hf://org/m", "served_model_name": "chat"})
PHASE = PhaseProgress(name="load", seconds=1.5, done=3, total=4, unit="bytes", is_finished=True)
CORE = msgspec.structs.replace(
    NO_CORE,
    state="serving",
    epoch=3,
    executor="mp",
    step=17,
    last_token_age_s=1.0,
    last_work_age_s=2.0,
    phases=(PHASE,),
    stats=SchedulerStats(
        num_running=5,
        num_waiting=6,
        num_blocks=8,
        num_free_blocks=2,
        queued_tokens=51,
        running_tokens=52,
        max_running_tokens=53,
        mean_output_tokens=54.5,
        draft_tokens=57,
        accepted_tokens=56,
        prefill_tokens_per_s=55.5,
    ),
    ranks=(
        RankReport(
            rank=1,
            node="n",
            host="h",
            pid=9,
            phase="step",
            heartbeat_age_s=0.25,
            step=16,
            memory_bytes=11,
            advance=12,
            communication_s=13.0,
            weight_bytes_read=14,
        ),
    ),
    model=ServedModel(
        path="/p",
        architecture="a",
        num_parameters=21,
        vocab_size=22,
        max_model_len=23,
        eos_token_ids=(1,),
        dtype="bfloat16",
        compute_dtype="float32",
        quantization="int8",
        weight_bytes=24,
        commit="c",
    ),
)
FIGURES = FrontFigures(
    engine_version="1",
    state="serving",
    reason="",
    uptime_s=100.0,
    num_in_flight=31,
    num_finished=32,
    num_failed=33,
    first_token_seconds={"+Inf": 34},
    adapters=[status.ReportedAdapter(name="sql", path="/sql", state="failed", message="gone")],
    recoveries=[
        RecoveryRecord(
            cause="core_lost",
            process="core",
            node="n",
            at=41.0,
            started_s=0.0,
            seconds=42.0,
            replayed_requests=43,
            phases=(PHASE,),
        )
    ],
    api_url="http://u",
)


def test_every_field_of_the_document() -> None:
    document = status_document(CONFIG, ReceivedStatus(core=CORE, age_s=0.5, is_connected=True), FIGURES)
    assert document.model_dump() == {
        "version": "v1",
        "engine_version": "1",
        "state": "serving",
        "reason": "",
        "executor": "mp",
        "epoch": 3,
        "step": 17,
        "last_token_age_seconds": 1.5,
        "last_work_age_seconds": 2.5,
        "uptime_seconds": 100.0,
        "model": {
            "name": "chat",
            "source": "hf://org/m",
            "commit": "c",
            "architecture": "a",
            "num_parameters": 21,
            "dtype": "bfloat16",
            "compute_dtype": "float32",
            "quantization": "int8",
            "weight_bytes": 24,
            "max_model_len": 23,
        },
        "startup": [{"name": "load", "seconds": 1.5, "done": 3, "total": 4, "unit": "bytes", "finished": True}],
        "ranks": [
            {
                "rank": 1,
                "node": "n",
                "host": "h",
                "pid": 9,
                "phase": "step",
                "heartbeat_age_seconds": 0.75,
                "step": 16,
                "memory_bytes": 11,
                "advance": 12,
                "communication_seconds": 13.0,
                "weight_bytes_read": 14,
            }
        ],
        "requests": {
            "in_flight": 31,
            "running": 5,
            "waiting": 6,
            "finished": 32,
            "failed": 33,
            "first_token_seconds": {"+Inf": 34},
        },
        "kv_cache": {"num_blocks": 8, "num_free_blocks": 2, "block_size": BLOCK_SIZE, "usage": 0.75},
        "load": {
            "queued_tokens": 51,
            "running_tokens": 52,
            "max_running_tokens": 53,
            "mean_output_tokens": 54.5,
            "prefill_tokens_per_second": 55.5,
            "decode_tokens_per_second": None,  # not measured yet
        },
        "adapters": [{"name": "sql", "path": "/sql", "state": "failed", "message": "gone", "commit": ""}],
        "adapters_from_hub": True,
        "speculation": {"draft_tokens": 57, "accepted_tokens": 56},
        "recoveries": [
            {
                "cause": "core_lost",
                "process": "core",
                "node": "n",
                "at": 41.0,
                "seconds": 42.0,
                "replayed_requests": 43,
                "phases": [{"name": "load", "seconds": 1.5}],
            }
        ],
        "api_url": "http://u",
    }


def test_a_lost_core_has_no_ranks_and_no_batch() -> None:
    document = status_document(CONFIG, ReceivedStatus(core=CORE, age_s=0.5), FIGURES)
    assert (document.ranks, document.requests.running, document.requests.waiting) == ([], 0, 0)
    assert document.kv_cache.num_blocks == 8


def test_before_the_first_core_status_the_document_is_empty() -> None:
    document = status_document(CONFIG, ReceivedStatus(), FIGURES)
    assert document.kv_cache == status.KvCache(num_blocks=0, num_free_blocks=0, block_size=BLOCK_SIZE, usage=0.0)
    assert (document.model, document.executor, document.last_token_age_seconds) == (None, "", None)
