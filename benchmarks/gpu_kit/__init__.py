"""The parts of ``benchmarks/gpu.py``: checks and measurements."""
