"""What there is to measure, found and checked before Ray or an engine starts.

`drafters` and `heads` find the candidates that a config names (`fits` says whether they suit, `made_heads` makes what
needs no training), `trials` turns them into trials, cohorts and interleaved rounds (pure), `placement` says what their
engines reserve; `prepare` calls all of them.
"""
