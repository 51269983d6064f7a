"""Answers: whole or as a stream of events, log-probabilities, usage."""
