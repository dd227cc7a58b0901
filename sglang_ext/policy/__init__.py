"""Draft length by load and by what is accepted: measured costs (`table.py`), estimates of what is accepted
(`acceptance.py`) and the choice of a step (`choice.py`).

Numbers alone: nothing here knows SGLang, which takes the choice in `sglang_ext.adapter.workers.policy`, or sweeps, of
which `rayspec.serving.policy` makes the table.
"""
