"""`asyncrl doctor`: one module of checks per concern."""
