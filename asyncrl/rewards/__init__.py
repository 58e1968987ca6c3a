"""Reward models: the probability of success from a frame and a task."""
