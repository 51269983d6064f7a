"""Routing: which engine of a service gets a request.

Pure: no torch, no clock, no logging, no randomness. The caller brings engines' reports in and sends requests out.

router      chooses an engine by tokens
rendezvous  an order of engines for a key, to break ties
fairness    API keys' shares over all engines
"""
