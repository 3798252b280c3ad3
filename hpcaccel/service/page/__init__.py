"""The page of the service: runs, sweeps and a form, in a browser."""
