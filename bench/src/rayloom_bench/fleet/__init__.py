"""A fleet of engines in virtual time: the real scheduler and the real router, with a model of a step's cost.

command       the command line and its tables
step_cost     seconds of a step, fitted to the figures of `bench step`
arrivals      requests with prompts of known prefixes
traffic       generators fitted to production traces
trace_files   the traces themselves
policies      round robin, least loaded, and the gateway's own choice
engine        an engine in virtual time
simulation    the fleet: arrivals, failures, starts and ends of engines
outcome       figures of a run
"""
