"""What was measured: `journal` on disk, in the `folder` of a sweep; `measured` is what its events say, and `results`
scores that by `rayspec.metrics` and `rayspec.statistics`. `stored` reads a sweep back from MLflow.
"""
