"""The replay keeps episodes and gives out complete and fresh groups. Imports no torch."""
