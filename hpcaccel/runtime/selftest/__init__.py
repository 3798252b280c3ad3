"""The self-test of one rank: ``python -m hpcaccel.runtime.selftest``. ``hpcaccel test`` starts it in every rank."""
