"""The replay: episodes in, complete and fresh groups out. Imports no torch."""
