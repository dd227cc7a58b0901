"""One folder an operation: reference.py in plain torch, later kernel.py in Triton and bench.py."""
