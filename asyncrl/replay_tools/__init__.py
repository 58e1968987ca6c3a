"""The `asyncrl replay` commands: list, draw, verify, export and delete the episodes of a replay."""
