"""Simulators: environments with true physics and true success, for data collection and evaluation."""
