"""The sweep: which head, how many draft steps, under which traffic.

`config` says what the user asked for, `drafters` and `head_plan` find it, as `candidate`s; `plan` turns them into
trials, cohorts and their interleaved rounds (pure). `made_heads` makes what is lacking.
`cohort` measures one of them on its `engines`, round by round, into the `journal`; `stopping` decides when its passes
end. `trainable` makes a cohort a trial of Ray Tune, `search` says which are run. `results` scores what was `measured`,
by `rayspec.metrics` and `rayspec.statistics`. `folder` is a sweep on disk, `stored` one that MLflow holds. Results come
back up as values (`rayspec.records`); nothing here knows `rayspec.driver`, which runs all of it, or `rayspec.report`.
"""
