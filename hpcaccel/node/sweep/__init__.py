"""A sweep's worker in its allocation: trials one after the other, each under a supervisor of its own."""
