"""Asynchronous reinforcement learning of vision-language-action policies inside video world models."""

__version__ = "0.1.0"
