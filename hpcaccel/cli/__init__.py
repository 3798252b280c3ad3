"""The command line: one small module a group of commands; each command imports what it needs when it runs."""
