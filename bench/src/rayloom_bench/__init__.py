"""`rayloom-engine bench`: measures an OpenAI-compatible server, a peer and the limit of the machine in one run.

command -> sequence               the settings; the order of a run
        -> server | endpoint      the measured server: an engine that the bench starts, or any URL
        -> workload -> client     prompts; streamed requests, each checked
        -> peer, limit_probe      transformers and the machine, each in a fresh process, never at the same time
        -> figures -> report      arithmetic; the table and the JSON document
        -> control_channel        `bench channel`: round trips of a step to a rank, compared with calls of a Ray actor
        -> parallel               `bench parallel`: layouts of a model over ranks, compared with one rank
        -> peers/                 `bench peers`: vLLM and llama.cpp, installed and measured in turn with this engine
"""

from rayloom_bench.command import add_flags, run

__all__ = ["add_flags", "run"]
