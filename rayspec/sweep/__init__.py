"""The sweep: which head, how many draft steps, under which traffic.

`config` says what the user asked for; `plan` turns it into trials and an interleaved schedule of blocks (pure);
`controller` is the only part that knows all the others: it asks `rayspec.farm` for measurements, `rayspec.metrics` and
`rayspec.statistics` for numbers, and gives both to `rayspec.tracking` and `rayspec.report`. `stopping` decides
when the passes end. Results come back up as values (`rayspec.records`, `results`); nothing below holds a reference to
the controller.
"""
