"""`rayloom-engine bench parallel`: several ranks of this engine on the same cores, compared with one rank."""
