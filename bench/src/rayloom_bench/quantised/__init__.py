"""`rayloom-engine bench quantised`: quantised GGUF files, served by this engine and by llama.cpp in turn.

command -> files                  the GGUF files, in the cache: the built-in model, and a wide model of random weights
        -> rounds                 starts both servers with each file in each round -> result -> page
"""
