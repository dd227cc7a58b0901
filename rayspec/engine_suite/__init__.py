"""What a step costs in SGLang, by draft head, drafter and batch, on models of any size with random weights: the second
half of rayspec gpu-suite. Speed does not depend on what a head learnt once the accepted length is held fixed.

models.py  writes the models
steps.py   measures one engine, in a process of its own
curves.py  all engines, the table and the figure
"""
