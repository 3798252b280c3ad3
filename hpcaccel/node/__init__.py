"""The batch step: supervises the ranks of one run inside one allocation.

Standard library only, and shipped into every run directory as ``node.pyz``: a cold shared file system makes each
import expensive, a container may hold no hpcaccel, and an upgrade must not touch a queued job.
"""
