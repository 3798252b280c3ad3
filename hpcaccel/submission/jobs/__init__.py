"""A run's jobs: backends, submitting a batch script, recording the job, recovery after an interruption."""
