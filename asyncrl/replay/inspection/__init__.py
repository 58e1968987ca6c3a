"""What `asyncrl replay` can do with a replay folder: tables, pictures, checks, exports, pruning."""
