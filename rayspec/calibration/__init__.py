"""Which tokens a reduced head keeps.

runs.py goes through one configuration: a source (sources.py) says what is counted, counting.py counts it on Ray Data,
a rule (rules.py lists them) turns counts into ids or clusters, `rayspec.artifacts` stores those, figures.py shows them.
The rules are plain torch and know neither Ray nor MLflow; a head gets what `load_artifacts` returns.
"""
