"""What a run looks like from outside: gathered from its directory, shown as a table, a live display or a summary."""
