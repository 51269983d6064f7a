"""Scheduling: which sequences compute how many tokens in the next step, and their KV blocks.

Pure: no torch, no clock, no logging, no randomness.

engine      a scheduler and an executor, step by step; step: the plan and the result that cross to the ranks
scheduler   the public face; planning/ decides a step
block_pool  KV blocks and the prefix index; window: the blocks that no later token sees
suspicion   which sequence the deaths of steps are held against
"""
