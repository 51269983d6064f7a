"""`rayloom-engine bench`: an OpenAI server, a peer and the machine's own limit, measured in one run.

command -> sequence               the settings; the order of a run
        -> server | endpoint      what is measured: an engine of our own, or any URL
        -> workload -> client     prompts; streamed requests, each checked
        -> peer, limit_probe      transformers and the machine, each in a fresh process, never at the same time
        -> figures -> report      arithmetic; the table and the JSON document
        -> control_channel        `bench channel`: a step's way to a rank and back, beside a Ray actor call
"""

from rayloom_bench.command import add_flags, run

__all__ = ["add_flags", "run"]
