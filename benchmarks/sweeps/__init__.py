"""Parts of ``benchmarks/sweep.py``, each a program of its own."""
