"""Reward models: frames and tasks come in, probabilities of success go out."""
