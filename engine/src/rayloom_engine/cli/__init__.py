"""The command line. A command imports its modules only when it runs."""
