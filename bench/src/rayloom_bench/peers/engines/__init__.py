"""The engines of a run: their installation, weights, command lines and environments."""
