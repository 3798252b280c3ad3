"""Starting the ranks, and the programs beside them: srun, torchrun, local processes."""
