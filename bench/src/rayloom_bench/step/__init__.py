"""`rayloom-engine bench step`: where a step on the C library spends its time, and the machine's limit.

command.py parses flags and prints; rank.py runs steps on a loaded model; cost.py computes bytes and operations;
limits.py measures the machine; table.py formats; sweeps.py measures the points of the plot, which plot.py draws;
page.py writes all of it as a page.
"""
