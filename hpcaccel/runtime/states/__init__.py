"""``PartialState``, ``AcceleratorState`` and ``GradientState``: rank, settings and accumulation, for scripts."""
