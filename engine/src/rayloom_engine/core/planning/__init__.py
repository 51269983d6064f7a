"""The plan of a step: the tokens, blocks and slots that each sequence gets.

step_planner   chooses sequences in the scheduler's order and adds them to a StepBuilder
admission      moves sequences between the waiting queue and the running sequences
step_builder   makes the StepPlan
running        the sequences that have a slot
waiting_queue  the sequences that wait for a slot
chunking       limits the tokens of a long prompt in one step
backlog        the time that prompts may take in a step with decodes
prompt_time    limits how many tokens of prompts fit into that time
short_prompts  tokens that are kept for short prompts while a long prompt is computed
shared_blocks  computed blocks that a waiting sequence can share
overtaking     limits how many sequences may be admitted before an earlier, longer one
spans          the positions that plans in flight compute
step_drafts    adds drafts to a step of decodes
step_proposals adds a draft model's drafts, and asks the draft model for those of the next step
drafted_blocks the blocks in which the draft model has KV
"""
