"""Commands for clusters behind SSH: the target cluster, forwarding, and the server on the login node."""
