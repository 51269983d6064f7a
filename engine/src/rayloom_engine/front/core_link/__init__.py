"""The connection to the EngineCore, and the memory of unfinished sequences that survives its death."""
