"""The development cluster: real munge, MariaDB, slurmdbd, slurmctld and several slurmd on one machine.

Standard library only, so that it runs before anything is installed.
"""
