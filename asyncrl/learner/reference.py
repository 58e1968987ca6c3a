"""Placeholder until the merge."""

from typing import Any

Reference = Any
