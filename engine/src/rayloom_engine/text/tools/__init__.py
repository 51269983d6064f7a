"""Tools of a request: how they are written into a prompt, and the grammars of their calls."""
