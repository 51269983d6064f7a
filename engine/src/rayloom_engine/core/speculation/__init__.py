"""Speculation: drafts of the next tokens of a sequence. Ranks verify a draft in one step.

A draft token is accepted if the sampler, given the logits at its position, picks the same token. The sampler is a pure
function of logits, seed and position, so the tokens of a sequence are the same with and without drafts.
"""
