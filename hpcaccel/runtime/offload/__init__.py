"""Models that are larger than a device: parts of their weights are in CPU memory or on disk until they are used."""
