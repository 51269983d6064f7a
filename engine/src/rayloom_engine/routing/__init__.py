"""Routing: which engine of a service gets a request.

Pure: no torch, no clock, no logging, no randomness. The caller passes in the engines' reports and sends the requests.

router           chooses an engine by tokens
rendezvous       an order of engines for a key, to break ties
prefix_index     an engine's cached KV blocks, as its core publishes them
engine_estimate  an engine's load and cache: its last reports, and the requests sent since
fairness         API keys' shares over all engines
"""
