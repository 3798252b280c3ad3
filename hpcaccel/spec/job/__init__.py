"""The models of a job spec: entrypoint, Slurm resources, environment, training, and their value types."""
