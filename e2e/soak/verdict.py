"""Decides whether a soak has measured memory and caused faults, and whether memory grows. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from soak.fault_plan import FAULTS
from soak.memory_trend import LEAST_SAMPLES, Trend, trend

ROLES = ("engine", "gateway", "operator")
SAMPLE_S = 20.0  # seconds between two samples of memory
WARM_S = 120.0  # seconds in which caches fill; only later samples count
# A run of at least this many seconds must have enough samples. The factor 3 allows for the times in which pods are
# replaced and no sample is possible.
LONG_S = WARM_S + 3 * LEAST_SAMPLES * SAMPLE_S

Samples = Mapping[str, Sequence[tuple[float, float]]]  # role -> (second of the run, MiB) of each sample


def trends(samples: Samples) -> dict[str, Trend]:
    """The trend of each role's memory after the first WARM_S seconds."""
    return {role: trend([each for each in samples.get(role, ()) if each[0] >= WARM_S]) for role in ROLES}


def shortcomings(seconds: float, faults: Mapping[str, int], samples: Samples) -> list[str]:
    """Returns a sentence for each role whose memory grows or was measured too rarely, and one if no fault happened.

    `seconds`: the length of the run; a long run must test more. `faults`: text returned by Strikes.strike ->
    number of faults, including faults that had no victim.
    """
    found = []
    if not any(faults.get(what) for what in itertools.chain(*FAULTS.values())):
        found.append("no fault happened")
    for role, line in trends(samples).items():
        if not samples.get(role):
            found.append(f"the memory of the {role} was never measured")
        elif line.num_samples < LEAST_SAMPLES and seconds >= LONG_S:
            found.append(
                f"the memory of the {role} has {line.num_samples} samples after {WARM_S:.0f} s; "
                f"a run of {LONG_S / 60:.0f} minutes or more needs {LEAST_SAMPLES}"
            )
        elif line.verdict == "GROWS":
            found.append(f"the memory of the {role} grows")
    return found
