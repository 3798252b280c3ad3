"""Cluster facts: probing a cluster, checking a job against the stored facts, planning where to submit.

``probe`` collects the facts, ``parse_facts`` reads Slurm's records, ``machine`` collects the other facts of the login
node. ``checks`` compares a job or a profile with the stored facts. ``plan`` compares partitions and sizes. Nothing is
submitted.
"""
