"""Models: model sizes from config.json, checkpoints, and the modules that compute."""
