"""The average of a training's weights, which is evaluated and exported in place of the last ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class WeightAverage(torch.optim.Optimizer):
    """An exponential moving average of parameters: average += (1 - d) (parameter - average) behind each step.

    d is the decay, but no more than (1 + t) / (10 + t) at step t, so that the first steps do not weigh for long. It
    changes no parameter: as the last of the optimizers it has their steps, and a checkpoint keeps it with their state.
    """

    def __init__(self, parameters: Iterable[Tensor], decay: float) -> None:
        super().__init__(parameters, {"lr": 0.0, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["average"] = parameter.detach().clone()
                state["step"] += 1
                t = float(state["step"])
                state["average"].lerp_(parameter, 1 - min(group["decay"], (1 + t) / (10 + t)))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange parameters and their averages."""
        for parameter, state in self.state.items():
            parameter.data, state["average"] = state["average"], parameter.data


@contextmanager
def averaged(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """The averages stand in the place of the parameters meanwhile, where they are kept."""
    averages = [optimizer for optimizer in optimizers if isinstance(optimizer, WeightAverage)]
    for average in averages:
        average.swap()
    try:
        yield
    finally:
        for average in averages:
            average.swap()
