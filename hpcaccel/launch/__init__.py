"""Starting ranks without a batch job: `hpcaccel launch`, and its configuration file."""
