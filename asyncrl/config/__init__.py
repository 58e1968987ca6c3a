"""Settings of a run: dataclasses, their bounds, TOML and flags. Imports no torch."""
