"""Bridges for other trainers. Each module needs the trainer that it is named after, and imports no other bridge."""
