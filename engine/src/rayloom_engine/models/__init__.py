"""Models: the sizes that a config.json gives, checkpoints, and the modules that compute them."""
