"""The sweep: which head, how many draft steps, under which traffic.

`config` says what the user asked for; `plan` turns it into trials, cohorts and their interleaved rounds (pure).
`cohort` measures one of them on its `engines`, round by round, into the `journal`; `stopping` decides when its passes
end. `trainable` makes a cohort a trial of Ray Tune, `search` says which are run. `controller`, in the driver, is the
only part that knows all the others: it runs the search, has the journal followed (`follow`) and published (`publish`,
to `rayspec.tracking`), and scores what was `measured` (`results`, by `rayspec.metrics` and `rayspec.statistics`).
Results come back up as values (`rayspec.records`); nothing below holds a reference to the controller. `folder` is a
sweep on disk.
"""
