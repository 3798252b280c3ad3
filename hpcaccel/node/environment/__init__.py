"""The ranks' environment on the nodes: containers and staged data."""
