"""Which tokens a reduced head keeps.

`runs` goes through one configuration: a source (`sources`) says what is counted, `counting` counts it on Ray Data,
a rule (`rules`) turns counts into ids or clusters, `rayspec.artifacts` stores those, `figures` shows them.
The rules are plain torch and know neither Ray nor MLflow; a head gets what `load_artifacts` returns.
"""
