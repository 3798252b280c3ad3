"""The command line: one small module per group of commands. Each command imports what it needs when it runs."""
