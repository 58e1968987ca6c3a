"""Files of a run: atomic writes, tensors, checkpoints, the run folder, and shipped files."""
