"""Work beside the current CUDA stream: what a router computes while the drafter's layer runs (DynaSpec)."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def start_beside(work: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Tensor]:
    """Start work(*inputs) on a CUDA stream of its own and return a function that hands over its result; call that on
    the stream of this call. Inputs on any other device: the work is done at once.

    The inputs may be overwritten as soon as this has returned. Fork and join are events, so that the host never waits
    and a graph that is being captured takes both along.
    """
    device = inputs[0].device
    if device.type != "cuda":
        result = work(*inputs)
        return lambda: result
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    # a layer adds its residual into its own input, while the work would still be reading it
    copies = [x.clone() for x in inputs]
    side.wait_stream(main)
    with torch.cuda.stream(side):
        result = work(*copies)

    def join() -> Tensor:
        main.wait_stream(side)
        # Not earlier: main could hand their memory out while the work still reads it. What the work allocates is the
        # side stream's, which before its next work waits for all that main has done with it.
        copies.clear()
        return result

    return join


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
