"""Small things that scripts import from Accelerate's utilities, and why some are not here."""
