"""What every side shares: the run directory, the records in it, and how they are read. Standard library only."""
