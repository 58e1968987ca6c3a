"""`asyncrl doctor`: the settings of a run in, a list of what works here and what is missing out."""
