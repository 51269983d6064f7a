"""Parts that several processes of the engine share."""
