"""Code that several processes of the engine use."""
