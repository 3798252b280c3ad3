"""Loading: YAML files and overrides become a validated spec, and a spec becomes text again."""
