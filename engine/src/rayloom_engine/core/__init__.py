"""The scheduler and its books. Pure: no torch, no clock, no logging, no randomness."""
