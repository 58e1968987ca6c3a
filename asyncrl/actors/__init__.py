"""Actors imagine episodes from start states with the newest weights."""
