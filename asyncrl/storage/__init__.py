"""Files of a run: atomic writes, tensors, checkpoints, the run folder, and where shipped files are."""
