"""`rayloom-engine bench peers`: this engine, vLLM and llama.cpp on one machine, measured in turn.

command -> settings               the checked flags
        -> engines/               installs each peer outside of the checkout; weights, command lines, environments
        -> rounds                 starts each engine once a round and measures every workload on it
        -> answers/               greedy answers of each engine, compared with those of transformers in float32
        -> result -> report/      ratios by round, goals; Markdown and SVG files for docs/benchmarks/
"""
