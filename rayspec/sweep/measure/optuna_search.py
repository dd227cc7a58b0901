"""Optuna chooses the next candidate by the speed-ups of those that were measured; no candidate twice."""

import random
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.trial import TrialState
from ray.tune.search import Searcher

from rayspec.sweep.candidate import Candidate
from rayspec.sweep.plan.trials import Cohort

ASKS = 20  # for a candidate that was not measured yet, before one is taken at random
Point = dict[str, str | int]


class OptunaCohorts(Searcher):
    """A Tune searcher over cohorts of one candidate each, by Optuna's ask and tell. Tune's own OptunaSearch would
    suggest a point of a finite space again and again once it is known to be good.

    `begun` are those of an earlier process, suggested first and in their order, so that Optuna learns from them again.
    """

    def __init__(self, cohorts: Sequence[Cohort], begun: Sequence[str], baseline: str, seed: int, metric: str) -> None:
        super().__init__(metric=metric, mode="max")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # `group`, which models the numbers of each series
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        candidates = {c.name: _candidate(c, baseline) for c in cohorts}
        self._space = SearchSpace(list(candidates.values()))
        self._points = {name: self._space.point(c) for name, c in candidates.items()}
        self._left = list(self._points)
        self._trials: dict[str, optuna.Trial] = {}
        self._random = random.Random(seed)
        for name in begun:
            self._study.enqueue_trial(self._points[name])

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        for attempt in range(ASKS + 1):
            if attempt == ASKS:
                self._study.enqueue_trial(self._points[self._random.choice(self._left)])
            trial = self._study.ask()
            wanted = self._space.suggest(trial)
            name = next((n for n in self._left if self._points[n] == wanted), None)
            if name is not None:
                self._left.remove(name)
                self._trials[trial_id] = trial
                return {"cohort": name}
            self._study.tell(trial, state=TrialState.FAIL)
        raise AssertionError("an enqueued point is the next that is asked for")

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        value = result.get(self.metric) if result and not error else None
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        self._study.tell(self._trials.pop(trial_id), value, state=state)

    def save(self, checkpoint_path: str) -> None:
        """Nothing: a resumed sweep begins with `begun`."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing, as `save`."""


class SearchSpace:
    """The series of a candidate's head, its numbers, and the draft steps.

    A number's dimension is the place of its value among those that the series has: ordered, so that ranks of 32 and 128
    say something of 64, and without values that no candidate has. Where a series' candidates have not all the same
    numbers, or are not told apart by them, each drafter is a series of its own.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        heads = {c.label: (c.series, tuple(sorted(c.head.numbers.items()))) for c in candidates}
        twice = {series for (series, _), count in Counter(heads.values()).items() if count > 1}
        named = {(series, tuple(name for name, _ in numbers)) for series, numbers in heads.values()}
        uneven = {series for series, count in Counter(series for series, _ in named).items() if count > 1}
        self._series = {label: label if series in twice | uneven else series for label, (series, _) in heads.items()}
        self._values: dict[str, dict[str, list[float]]] = {}  # values of each series, by the name of a number
        for series in dict.fromkeys(self._series.values()):
            own = [c.head.numbers for c in candidates if self._series[c.label] == series]
            values = {name: sorted({numbers[name] for numbers in own}) for name in own[0]}
            self._values[series] = {name: found for name, found in values.items() if len(found) > 1}
        self._steps = sorted({c.draft_steps for c in candidates})

    def point(self, candidate: Candidate) -> Point:
        series = self._series[candidate.label]
        places = {
            _dimension(series, name): values.index(candidate.head.numbers[name])
            for name, values in self._values[series].items()
        }
        return {"series": series, "draft_steps": self._steps.index(candidate.draft_steps), **places}

    def suggest(self, trial: optuna.Trial) -> Point:
        series = trial.suggest_categorical("series", sorted(self._values))
        assert isinstance(series, str), "one of those that were given"
        places = {
            key: trial.suggest_int(key, 0, len(values) - 1)
            for key, values in {"draft_steps": self._steps, **self._of(series)}.items()
        }
        return {"series": series, **places}

    def _of(self, series: str) -> Mapping[str, Sequence[float]]:
        return {_dimension(series, name): values for name, values in self._values[series].items()}


def _dimension(series: str, number: str) -> str:
    return f"{number} of {series}"


def _candidate(cohort: Cohort, baseline: str) -> Candidate:
    """The one that a cohort is measured for."""
    return next((c for c in cohort.candidates if not c.is_baseline(baseline)), cohort.candidates[0])
