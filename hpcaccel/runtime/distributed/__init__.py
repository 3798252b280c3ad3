"""The ranks of a training: environment, rendezvous, devices, process groups and collectives."""
