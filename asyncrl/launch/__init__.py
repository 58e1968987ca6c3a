"""From a command line to running processes: placement, supervision, wiring."""
