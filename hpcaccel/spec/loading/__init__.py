"""Load YAML files and overrides into a validated spec, and write a spec as YAML."""
