"""The connection to the core. The front stores unfinished sequences here, so they survive the core's death."""
