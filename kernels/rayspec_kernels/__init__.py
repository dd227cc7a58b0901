"""One folder an operation: reference.py in plain torch, kernel.py in Triton, bench.py; what they share is in common."""
