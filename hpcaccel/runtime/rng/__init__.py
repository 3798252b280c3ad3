"""Random number generators: seeds, the state of the global generators, and generators that the script has created."""
