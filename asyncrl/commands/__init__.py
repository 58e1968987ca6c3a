"""What `asyncrl COMMAND` runs: one module per command."""
