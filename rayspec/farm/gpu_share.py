"""What each of several engines on one GPU may take of it, and where they are put so that it is one GPU."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

FOR_ENGINES = 0.84  # of a GPU, for weights and caches of all its engines; the rest is for activations and graphs


def equal_share(engines: int) -> float:
    """Of so many engines on a GPU, what each may take of it for weights and cache."""
    return round(FOR_ENGINES / engines, 3)


def memory_fraction(share: float, others: int) -> dict[str, float]:
    """SGLang's `mem_fraction_static` of an engine that starts beside `others`, each of which has this share of the GPU.

    It is a fraction of what is free when an engine starts: SGLang measures that before it loads weights, and its cache
    takes what is free afterwards less (1 - fraction) of it. So a second engine's is of what the first has left, and one
    must be up before the next one starts.
    """
    left = 1.0 - others * share
    assert left >= share, "more engines on a GPU than its shares were made for"
    return {"mem_fraction_static": round(share / left, 3)}


@contextmanager
def one_gpu_each(bundles: Sequence[Mapping[str, float]]) -> Iterator[list[Any]]:
    """Scheduling strategies, one a bundle of at most one GPU: the actors that name the same one share that GPU.

    Ray would put two actors of half a GPU onto two cards, or two nodes, if it pleased.
    """
    import ray  # with the next one, a second
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    groups = [ray.util.placement_group([dict(bundle)]) for bundle in bundles]
    try:
        yield [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0) for group in groups]
    finally:
        for group in groups:
            ray.util.remove_placement_group(group)
