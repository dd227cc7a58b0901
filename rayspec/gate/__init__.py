"""Whether a candidate may replace a baseline: the gate that `rayspec gate` puts in front of a merge.

`config` says what is asked. A `Side` (`sides`) answers blocks of prompts: a drafter in an engine of ours (`engines`) or
an OpenAI-compatible server (`endpoint`, whose answers `wire` reads). `rounds` has both answer in turn and asks
`decision` after a growing number of rounds whether that is enough; `decision` knows numbers alone. `report` says what
was found.
"""
