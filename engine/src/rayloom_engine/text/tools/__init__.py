"""Tools of a request: their way into a prompt, and the grammars of their calls."""
