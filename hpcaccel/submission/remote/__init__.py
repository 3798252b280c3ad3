"""Clusters behind SSH, which are the clusters whose profile has a ``host``.

The user's command is run again on the login node, by the hpcaccel that is installed there. Both sides exchange frames
over the standard streams of one SSH session (``protocol``). The command line of such a session is fixed: arguments,
values of secrets and the spec itself are sent on stdin.

========================  ==========================================================================================
this machine
------------------------  ------------------------------------------------------------------------------------------
``connection``            an SSH connection made by fabric
``login``                 authentication (agent, key files, one-time codes, password) and host keys
``openssh``               an SSH connection made by the user's own ``ssh``, if it shares connections
``protocol``              starting hpcaccel on the login node; hello line, frames, versions
``remote_cluster``        ``RemoteCluster``: requests, repeated after a broken connection
``bundle``, ``archives``  loading a spec for the cluster, and sending it with its code
``pulling``               fetching results
``install``               installing hpcaccel on the cluster
``remote_index``          index of runs on clusters, and keys of unconfirmed submissions
------------------------  ------------------------------------------------------------------------------------------
login node
------------------------  ------------------------------------------------------------------------------------------
``requests``              executing requests once
``files``                 receiving code, listing and sending results
========================  ==========================================================================================
"""

from __future__ import annotations

from hpcaccel.submission.remote.remote_cluster import RemoteCluster, RemoteResult

__all__ = ["RemoteCluster", "RemoteResult"]
