"""What the two engines of a cohort reserve, and whether they run side by side or take turns. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rayspec.farm.gpu_share import equal_share, memory_fraction
from rayspec.farm.ranks import ranks_of
from rayspec.sweep.config import SweepConfig

MEMORY_SHARE = equal_share(2)
# torch's, Triton's, CUDA's and cuBLAS's words; SGLang's before its cache, and of weights that leave nothing for it
NO_MEMORY = re.compile(r"out of memory|not enough (gpu )?memory|no gpu memory|ALLOC_FAILED", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """`num_cpus`, `num_gpus`: of one engine, on each of its nodes. `memory_share`: of a GPU that two engines share,
    what each may take for weights and cache; None where they share none."""

    num_cpus: float
    num_gpus: float
    side_by_side: bool = True
    memory_share: float | None = None

    @property
    def bundle(self) -> dict[str, float]:
        """What a cohort reserves on each node of its engines."""
        engines = 2 if self.side_by_side else 1
        return {k: engines * v for k, v in (("CPU", self.num_cpus), ("GPU", self.num_gpus)) if v}

    def memory_fraction(self, others: int) -> dict[str, float]:
        """SGLang's `mem_fraction_static` beside so many running engines of the pair, where two share a GPU."""
        return {} if self.memory_share is None else memory_fraction(self.memory_share, others)

    def with_way_out(self, cause: str) -> str:
        """Why an engine of a sweep did not start. Its first line, all that tables show, ends with what to do where two
        engines share a GPU whose memory did not do; SGLang advises a larger `mem_fraction_static`, which is not theirs
        to have."""
        if self.memory_share is None or not NO_MEMORY.search(cause):
            return cause
        first, newline, rest = cause.partition("\n")
        return (
            f"{first.rstrip('. ')}; two engines share this GPU, "
            f"in a new sweep with ray.side_by_side=false they take turns{newline}{rest}"
        )


def _check_share(num_gpus: float, ranks: int, takes_turns: bool) -> None:
    """Raise ValueError for a `ray.num_gpus` that Ray would reserve and engines would not keep to."""
    if num_gpus and ranks > 1 and num_gpus != ranks:
        raise ValueError(
            f"ray.num_gpus is what one engine takes of a node, where it has {ranks} ranks with a GPU each, got "
            f"{num_gpus:g}; leave it out"
        )
    if 0 < num_gpus < 0.5 or (takes_turns and num_gpus == 0.5):
        allowed = "above 0.5 with ray.side_by_side=false" if takes_turns else "0.5 or more"
        raise ValueError(
            f"ray.num_gpus must be 0 or {allowed}, got {num_gpus:g}: Ray would put two cohorts on one GPU, whose "
            "memory the engines of one alone share out; leave it out"
        )


def place(config: SweepConfig, gpus_of_nodes: Sequence[float]) -> Placement:
    """For a cluster whose nodes have so many GPUs. Raises ValueError where an engine has no room."""
    most, nodes = max(gpus_of_nodes, default=0.0), config.engine.nodes
    ranks = ranks_of(config.engine.extra)
    num_gpus, side_by_side = config.ray.num_gpus, config.ray.side_by_side
    whole = ranks // nodes  # Ray divides one GPU, of several it gives whole ones
    if num_gpus is not None:
        _check_share(num_gpus, whole, takes_turns=side_by_side is False)
    else:
        num_gpus = (float(whole) if whole > 1 or side_by_side is False else 0.5) if most else 0.0
    if side_by_side is None:
        side_by_side = 2 * num_gpus <= most
    placement = Placement(num_cpus=config.ray.num_cpus, num_gpus=num_gpus, side_by_side=side_by_side)
    asked = placement.bundle.get("GPU", 0)
    if asked > most:  # Ray would wait for such a node without a word
        way_out = "leave ray.side_by_side out" if num_gpus <= most else "raise engine.nodes"
        raise ValueError(
            f"the engines of a cohort need {asked:g} GPUs of a node ({ranks} ranks, tp_size x pp_size x dp_size of "
            f"engine.extra, over engine.nodes {nodes}; ray.num_gpus {num_gpus:g} each), but no node of the Ray cluster "
            f"has more than {most:g}; {way_out}, or lower the ranks"
        )
    if not side_by_side or not 0 < num_gpus < 1:
        return placement
    share = config.engine.mem_fraction_static or MEMORY_SHARE
    if share >= 0.5:
        raise ValueError(
            f"engine.mem_fraction_static is the share of each of two engines on one GPU and must be below 0.5, got "
            f"{share:g}; set ray.side_by_side=false where they do not fit side by side: they then take turns"
        )
    return Placement(num_cpus=config.ray.num_cpus, num_gpus=num_gpus, memory_share=share)
