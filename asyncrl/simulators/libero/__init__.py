"""LIBERO's suites of tabletop tasks, played by the official protocol."""
