"""The plan of a step: which sequences get how many tokens, blocks and slots.

step_planner fills a builder in the scheduler's order; builder becomes the StepPlan. running and waiting_queue hold the
sequences, chunking and overtaking bound them, spans are the positions of plans in flight.
"""
