"""The batch step: supervises the ranks of a run, or the trials of a sweep's worker, in one allocation.

This package and the hpcaccel packages that it imports use the standard library only. They are copied into every run
directory as ``node.pyz``, because imports from a cold shared file system are slow, a container may not have hpcaccel,
and an upgrade must not affect a queued job.
"""
