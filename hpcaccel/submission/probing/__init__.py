"""Finding out what a cluster is, from what its own programs say, here or on a login node over a connection.

``probe`` asks and puts together, ``parse_facts`` turns Slurm's records into facts, ``machine`` asks what is not Slurm:
containers, quotas, Python. ``profile_checks`` compares a profile with stored facts. Nothing here submits or changes
anything.
"""

from hpcaccel.submission.probing.probe import probe
from hpcaccel.submission.probing.profile_checks import STALE_DAYS, Contradiction, check

__all__ = ["STALE_DAYS", "Contradiction", "check", "probe"]
