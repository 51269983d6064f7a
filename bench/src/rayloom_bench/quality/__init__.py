"""`rayloom-engine bench quality`: speed, memory and perplexity of int8 weights, compared with plain weights."""
