"""The section ``sweep`` of a spec file: parameters, pruners, checks, and the job spec of one trial."""
