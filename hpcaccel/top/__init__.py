"""``hpcaccel top``: runs, one run and its log in a terminal."""
