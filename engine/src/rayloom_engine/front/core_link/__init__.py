"""The connection to the core. It remembers unfinished sequences, so they survive the core's death."""
