"""Metrics, waits, activities of processes, console, signals and the watchdog of a run."""
