"""Actors imagine episodes: weights and start states in, episodes out."""
