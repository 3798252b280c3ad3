"""Submitted runs: lookup, status, stop, resume and cleaning."""
