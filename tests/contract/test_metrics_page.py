"""docs/metrics.md has the metrics that engine and operator register, with their labels."""

import importlib.util
import re
from pathlib import Path

import pytest

from rayloom_engine.core.stats import SchedulerStats
from rayloom_engine.front.core_link.recoveries import RecoveryRecord
from rayloom_engine.front.operations.metrics import Metrics
from rayloom_engine.protocol.messages import CoreStatus, PhaseProgress, RankReport

ROOT = Path(__file__).resolve().parents[2]


def load_tool():
    spec = importlib.util.spec_from_file_location("write_metrics_page", ROOT / "tools" / "write_metrics_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()


def test_the_page_is_current():
    assert TOOL.FILE.read_text(encoding="utf-8") == TOOL.page(), "docs/metrics.md is not current; run: make schemas"


def test_every_metric_has_a_meaning_and_stands_once():
    rows = (*TOOL.engine_rows(), *TOOL.operator_rows())

    assert len({name for name, _, _, _ in rows}) == len(rows)
    assert all(meaning.endswith(".") for _, _, _, meaning in rows)
    assert {kind for _, kind, _, _ in rows} == {"gauge", "counter", "histogram"}


def busy_engine():
    """Metrics of an engine that has observed a value for each metric."""
    metrics = Metrics("m")
    rank = RankReport(rank=0, node="n", host="h", pid=1, phase="idle", heartbeat_age_s=0.1, step=1, memory_bytes=1)
    phase = PhaseProgress(name="load", seconds=1.0, done=1, total=1, unit="bytes", is_finished=True)
    status = CoreStatus(
        state="serving",
        epoch=1,
        executor="mp",
        step=1,
        last_token_age_s=0.1,
        phases=(phase,),
        stats=SchedulerStats(),
        ranks=(rank,),
    )
    metrics.observe_core(status, core_pid=1)
    metrics.observe_heartbeats(status, 0.0)
    metrics.success.add(1, finished_reason="stop")
    metrics.observe_recovery(
        RecoveryRecord(cause="killed", process="rank 0", node="n", at=0.0, started_s=0.0, seconds=1.0)
    )
    return metrics


@pytest.mark.parametrize("row", TOOL.engine_rows(), ids=lambda row: row[0])
def test_samples_of_an_engine_have_the_labels_of_the_page(row):
    name, kind, labels, _ = row
    found = re.findall(rf"^{name}(?:_bucket|_sum|_count)?{{(.*)}} ", busy_engine().text(), re.MULTILINE)
    names = {frozenset(re.findall(r'(\w+)="', each)) - {"model_name", "le"} for each in found}

    # Events that only happen in a running engine have no sample here.
    assert names <= {frozenset(labels)}, kind
