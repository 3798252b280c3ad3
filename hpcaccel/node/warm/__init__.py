"""Warm parents: each rank's parent process outlives the rank, and starts the rank's next attempt by fork.

``start_warm`` is the shim's part, ``warm_parent`` the process itself, which imports torch while the first rank runs,
``warm_program`` turns a forked process into the user's program, ``warm_channel`` is both ends of the connection to the
supervisor, and ``warm_ranks`` the supervisor's view of the ranks.
"""
