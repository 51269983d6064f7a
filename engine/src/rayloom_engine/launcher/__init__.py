"""The launcher's process: starts ranks, sees them die, starts them again. Its own death costs the ranks, no request."""
