"""Why an attempt failed, and on which nodes: causes, classification, hangs, exclusion, preflight checks."""
