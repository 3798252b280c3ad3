"""What the nodes must have before the ranks start: containers and staged data."""
