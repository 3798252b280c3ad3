"""The code that a run executes: the copy of the user's code, the copied parts of hpcaccel, and the Git state."""
