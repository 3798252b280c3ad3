"""Clusters behind SSH: a profile with ``host``.

The same command runs on the login node, by the hpcaccel that is installed there; the two speak in frames over the
standard streams of one SSH session (``protocol``). The command line there is always the same few words: arguments,
values of secrets and the spec itself travel on stdin.

========================  ==========================================================================================
``connection``            an SSH connection made by fabric: host keys, jump hosts, what goes wrong in plain words
``login``                 who we are: agent, key files, one-time codes, a password
``openssh``               the same through the user's own ``ssh``, where its configuration shares connections
``program_session``       one program on the login node, and its streams
``protocol``              hello, frames, versions
``remote_cluster``        ``RemoteCluster``: asking, and asking again when the connection broke
``code``, ``bundle``      what a submission takes along
``store``                 the other side: where code arrives
``pulling``, ``serving``  results back: this side, the other side
``remote_index``          which run is on which cluster, and which submission is not known to have come through
========================  ==========================================================================================
"""

from __future__ import annotations

from hpcaccel.submission.remote.remote_cluster import Answer, RemoteCluster

__all__ = ["Answer", "RemoteCluster"]
