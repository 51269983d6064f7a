"""The core's side of its ranks: who is attached, how they come together, how they run a plan."""
