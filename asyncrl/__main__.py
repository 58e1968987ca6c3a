"""`python -m asyncrl` is the same as `asyncrl`."""

from asyncrl.cli import program

program()
