"""The command line. Each command imports its modules only when it runs."""
