"""The `asyncrl replay` commands: list, draw, verify, export and clean up what a replay holds."""
