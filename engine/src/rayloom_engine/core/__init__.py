"""Scheduling: which sequences compute how many tokens in the next step, and their KV blocks.

Pure: no torch, no clock, no logging, no randomness.

engine      runs a scheduler and an executor, step by step; step: the plan and the result, exchanged with the ranks
scheduler   the interface of this package; planning/ decides the content of a step
block_pool  KV blocks and the prefix index; window: the blocks that a sliding window no longer needs
suspicion   finds the sequence that crashes every process that computes it
"""
