"""The run directory, its records and their readers, shared by all other packages. Standard library only."""
