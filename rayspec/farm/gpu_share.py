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


def check_room(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raise ValueError unless each bundle fits on a node, and there are GPUs for all of them."""
    for bundle in bundles:
        if not any(all(node.get(name, 0.0) >= amount for name, amount in bundle.items()) for node in nodes):
            found = ", ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
            raise ValueError(
                f"engines that share a GPU need a node with {bundle['CPU']:g} CPUs and {bundle['GPU']:g} GPUs, but the "
                f"nodes have {found}; reserve fewer CPUs for each (num_cpus), or let fewer share a GPU (num_gpus)"
            )
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    if len(bundles) > gpus:
        raise ValueError(
            f"engines are to share {len(bundles)} GPUs, but the cluster has {gpus}; start fewer engines, or let more "
            "of them share a GPU (num_gpus)"
        )


@contextmanager
def one_gpu_each(bundles: Sequence[Mapping[str, float]]) -> Iterator[list[Any]]:
    """Scheduling strategies, one a bundle of at most one GPU: the actors that name the same one share that GPU.

    Ray would put two actors of half a GPU onto two cards, or two nodes, if it pleased. Raises ValueError where no node
    has room for one of them, for which Ray would wait without a word.
    """
    import ray  # with the next one, a second
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    if bundles:
        check_room(bundles, [node["Resources"] for node in ray.nodes() if node["Alive"]])
    groups = [ray.util.placement_group([dict(bundle)]) for bundle in bundles]
    try:
        yield [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0) for group in groups]
    finally:
        for group in groups:
            ray.util.remove_placement_group(group)
