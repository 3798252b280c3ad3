"""Reports of runs and sweeps to send to others: one HTML file that needs no network, or one picture."""
