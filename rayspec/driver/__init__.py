"""The process that drives a sweep: the only part that knows plan, engines, scores, tracking and report.

`controller` runs the search of `rayspec.sweep`, has its journal followed (`follow`) and published to MLflow (`publish`,
with the figures and verdicts of `rayspec.report`), and scores what was measured.
"""
