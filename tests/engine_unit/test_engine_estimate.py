"""A gateway's estimate of an engine's load and cache between two reports."""

from __future__ import annotations

from rayloom_engine.core.load import SchedulerLoad, TenantLoad
from rayloom_engine.protocol.messages import CacheChanges
from rayloom_engine.routing.engine_estimate import EngineEstimate
from rayloom_engine.routing.prefix_index import cut_hashes

HASHES = [bytes([number]) * 16 for number in range(1, 5)]
BLOCKS = cut_hashes(HASHES)  # four blocks of 16 tokens


def make_estimate(num_cached: int = 0) -> EngineEstimate:
    estimate = EngineEstimate("a")
    added = b"".join(content[:8] for content in HASHES[:num_cached])
    assert estimate.changed(CacheChanges(start=1, number=0, block_size=16, added=added, num_parts=1))
    return estimate


def numbers(estimate: EngineEstimate, tenant: str = "") -> tuple[int, int, int]:
    view = estimate.view(tenant, 64, BLOCKS)
    return view.outstanding_prefill_tokens, view.num_decodes, view.cached_tokens


def report(prefill: int, decodes: int = 0) -> SchedulerLoad:
    tenants = (TenantLoad(tenant="", prefill_tokens=prefill),) if prefill else ()
    return SchedulerLoad(num_decodes=decodes, tenants=tenants)


def test_a_sent_prompt_counts_at_once_and_its_prefix_as_cached() -> None:
    estimate = make_estimate(num_cached=1)
    assert numbers(estimate) == (0, 0, 16)
    estimate.sent("s", "", 70, BLOCKS)
    assert numbers(estimate) == (54, 0, 64)  # 70 tokens, 16 of them cached
    estimate.sent("t", "", 70, BLOCKS)
    assert numbers(estimate) == (60, 0, 64)  # 6 tokens after the prefix that the first sequence computes


def test_a_report_replaces_the_guess_and_a_first_token_makes_a_decode() -> None:
    estimate = make_estimate()
    estimate.sent("s", "", 64, BLOCKS)
    estimate.reported(report(prefill=30))
    assert numbers(estimate) == (30, 0, 64)
    estimate.has_token("s")
    estimate.has_token("s")
    assert numbers(estimate) == (30, 1, 64)
    # The core publishes its cached blocks before it sends this report. So the estimate drops the blocks that it only
    # expected.
    estimate.reported(report(prefill=0, decodes=1))
    assert numbers(estimate) == (0, 1, 0)


def test_a_sequence_that_ends_before_the_report_leaves_nothing() -> None:
    estimate = make_estimate()
    estimate.sent("s", "", 64, BLOCKS)
    estimate.ended("s")
    assert numbers(estimate)[:2] == (0, 0)
    estimate.ended("s")
    estimate.reported(report(prefill=0))
    assert numbers(estimate) == (0, 0, 0)


def test_a_flood_of_another_tenant_does_not_repel() -> None:
    estimate = make_estimate()
    for number in range(100):
        estimate.sent(str(number), "flood", 1000, ())
    assert estimate.view("other", 64, ()).outstanding_prefill_tokens == 64
    assert estimate.view("flood", 64, ()).outstanding_prefill_tokens == 100_000


def test_a_refused_prompt_leaves_no_blocks_behind() -> None:
    estimate = make_estimate(num_cached=1)
    estimate.sent("kept", "", 70, BLOCKS[:2])
    estimate.sent("refused", "", 70, BLOCKS)
    assert numbers(estimate)[2] == 64
    estimate.refused("refused")
    assert numbers(estimate) == (54, 0, 32), "the block that the other one computes still counts"
    estimate.refused("refused")
    estimate.ended("kept")
    estimate.reported(report(prefill=0))
    assert numbers(estimate) == (0, 0, 16)
