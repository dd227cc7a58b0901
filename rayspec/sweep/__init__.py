"""The sweep: which head, how many draft steps, under which traffic.

`config` says what the user asked for; a `candidate` of some `shape` is what is chosen between. `plan` finds the
candidates, makes what is lacking and lays out the trials; `measure` runs them on engines, cohort by cohort; `record`
keeps what was measured and scores it. Results come back up as values (`rayspec.records`); nothing here knows
`rayspec.driver`, which runs all of it, or `rayspec.report`.
"""
