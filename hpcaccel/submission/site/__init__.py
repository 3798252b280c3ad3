"""A spec held against the stored facts of its cluster, before the queue."""
