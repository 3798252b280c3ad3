"""The jobs of a run: backends, submitting a batch script, recording the job, recovery after an interruption."""
