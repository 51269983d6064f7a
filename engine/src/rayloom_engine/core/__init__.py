"""Scheduling: decides how many tokens each sequence computes in the next step, and allocates KV blocks.

Pure: no torch, no clock, no logging, no randomness.

engine      runs steps: gets plans from the scheduler and submits them to an executor
step        the messages between EngineCore and ranks: a step's plan and its result
scheduler   adds, aborts and schedules sequences; planning/ decides the content of a step
block_pool  KV blocks and the prefix index
window      finds the blocks that a sliding window no longer needs
suspicion   finds the sequence that crashes every process that computes it
"""
