"""The front as a program of its own: one API port in front of all engines of a service."""
