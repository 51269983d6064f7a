"""Reference values for simulated fleets: the hits of an infinite cache, and the measured points of a page."""

import re

from rayloom_bench.fleet.step_cost import points_of_sweeps


def best_hit_tokens(arrivals, block_size):
    """Returns the number of prompt tokens that an infinite cache would contain: each block is computed only once."""
    seen = set()
    num_hits = 0
    for arrival in arrivals:
        ids = arrival.prompt_ids()
        content = 0
        is_hit = True
        for end in range(block_size, len(ids), block_size):  # the last token of a prompt is always computed
            content = hash((content, ids[end - block_size : end]))
            is_hit = is_hit and content in seen
            num_hits += block_size * is_hit
            seen.add(content)
    return num_hits


def points_of_page(text):
    """The measured points of a page that `bench step --page` wrote."""
    context, chunk = (
        int(re.search(pattern, text)[1]) for pattern in (r"\| sequences of (\d+) tokens", r"in steps of (\d+)")
    )
    names = {"## Decode": "decode", "## Prefill": "prefill", "## One decoded token": "one decoded token"}
    sweeps = {}
    for section in text.split("\n\n## "):
        title = names.get("## " + section.partition("\n")[0])
        if title is not None:
            rows = re.findall(r"^\| (\d+) \| ([\d.]+) \|", section, flags=re.M)
            sweeps[title] = {"measured": [(float(x), float(y)) for x, y in rows]}
    return points_of_sweeps(sweeps, context, chunk)
