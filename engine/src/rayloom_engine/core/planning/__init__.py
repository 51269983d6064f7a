"""The plan of a step: which sequences get how many tokens, blocks and slots.

step_planner   chooses sequences in the scheduler's order and gives them to step_builder, which makes the StepPlan
running, waiting_queue   the sequences with a slot, and those without
chunking, overtaking     limits: prompt tokens of a step, sequences admitted before a longer one
spans          the positions that plans in flight compute
"""
