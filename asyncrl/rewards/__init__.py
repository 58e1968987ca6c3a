"""Reward models, which tell from a frame and a task how probable success is."""
