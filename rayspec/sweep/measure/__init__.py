"""Cohorts on engines, as trials of Ray Tune, into the journal.

`cohort` measures one on its `engines`, round by round; `stopping` decides when its passes end; `trainable` makes it a
trial of Tune; `search` says which are run, `optuna_search` by what was found so far.
"""
