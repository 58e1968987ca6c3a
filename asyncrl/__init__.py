"""Asynchronous reinforcement learning of vision-language-action policies inside video world models."""

__version__ = "0.2.0"
