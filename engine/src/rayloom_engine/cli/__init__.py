"""The command line. A command imports what it needs only when it runs."""
