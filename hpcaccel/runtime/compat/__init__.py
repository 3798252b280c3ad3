"""Functions that scripts import from Accelerate's utilities, and reasons for the names that hpcaccel does not have."""
