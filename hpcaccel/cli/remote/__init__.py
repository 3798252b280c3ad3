"""Commands on a cluster behind SSH: which cluster is meant, what travels there, and the program that answers there."""
