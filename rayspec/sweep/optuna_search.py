"""Optuna chooses the next candidate by the speed-ups of those that were measured; no candidate twice."""

import random
from collections.abc import Sequence
from typing import Any

import optuna
from optuna.trial import TrialState
from ray.tune.search import Searcher

from rayspec.sweep.plan import Cohort

ASKS = 20  # for a candidate that was not measured yet, before one is taken at random


class OptunaCohorts(Searcher):
    """A Tune searcher over cohorts of one candidate each, by Optuna's ask and tell. Tune's own OptunaSearch would
    suggest a point of a finite space again and again once it is known to be good.

    `begun` are those of an earlier process, suggested first and in their order, so that Optuna learns from them again.
    """

    def __init__(self, cohorts: Sequence[Cohort], begun: Sequence[str], baseline: str, seed: int, metric: str) -> None:
        super().__init__(metric=metric, mode="max")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._points = {c.name: _point(c, baseline) for c in cohorts}
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
            drafter = trial.suggest_categorical("drafter", sorted({d for d, _ in map(_values, self._points.values())}))
            steps = trial.suggest_categorical(
                "draft_steps", sorted({s for _, s in map(_values, self._points.values())})
            )
            wanted = {"drafter": drafter, "draft_steps": steps}
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


def _point(cohort: Cohort, baseline: str) -> dict[str, Any]:
    heads = [c.label for c in cohort.candidates]
    return {"drafter": next((h for h in heads if h != baseline), baseline), "draft_steps": cohort.draft_steps}


def _values(point: dict[str, Any]) -> tuple[str, int]:
    return point["drafter"], point["draft_steps"]
