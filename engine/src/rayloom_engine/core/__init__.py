"""Scheduling: which sequences compute how many tokens in the next step, and their KV blocks.

Pure: no torch, no clock, no logging, no randomness.

engine      a scheduler and an executor, step by step; step: the plan and the result that cross to the ranks
scheduler   the public face; step_planner fills a step, draft turns it into a plan
running, waiting_queue, overtaking, chunking, window   parts of that decision
block_pool  KV blocks and the prefix index
suspicion, spans   which sequence the deaths of steps are held against
"""
