"""Which speculative algorithm of SGLang serves a drafter; those of ours are a drafter kind with a tree. Imports nothing
of SGLang."""

from pathlib import Path
from typing import NamedTuple

from sglang_ext.drafters.checkpoint_config import CheckpointInfo, is_language_model, read_config, read_info


class Requirement(NamedTuple):
    """What a checkpoint must be for an algorithm. `tree` None: a chain of the best, whatever tree it has."""

    drafters: tuple[str, ...]
    tree: str | None


ALGORITHMS: dict[str, Requirement] = {
    "BPD": Requirement(("medusa",), None),
    "MEDUSA": Requirement(("medusa",), "static"),
    "HYDRA": Requirement(("hydra",), "static"),
    "SLIM": Requirement(("medusa",), "slim"),
    "SPECFORMER": Requirement(("specformer",), None),
}


SGLANG_S: dict[str, str] = {"eagle3": "EAGLE3", "independent": "STANDALONE"}  # chains and trees


def algorithm_of(drafter: str | Path, topk: int) -> str:
    """The speculative algorithm that serves a drafter: a folder of ours, of a stock EAGLE-3 drafter or of an ordinary
    language model, or a Hugging Face name, which is a stock EAGLE-3 drafter. Raises ValueError for a folder that cannot
    be read."""
    if not Path(drafter).is_dir():
        return "EAGLE3"
    if is_language_model(read_config(drafter)):
        return "STANDALONE"
    info = read_info(drafter)
    if info.kind in SGLANG_S:
        return SGLANG_S[info.kind]
    tree = "static" if info.tree is None else info.tree.get("kind")
    fitting = [name for name, serves in ALGORITHMS.items() if info.kind in serves.drafters]
    is_chain = all(ALGORITHMS[name].tree is None for name in fitting)
    if is_chain and topk > 1:
        raise ValueError(f"drafter {drafter}: a {info.kind} drafter is served as a chain; set topk to 1, got {topk}")
    if is_chain or topk == 1:  # of the medusa kind: BPD comes first
        return fitting[0]
    found = next((name for name in fitting if ALGORITHMS[name].tree == tree), None)
    if found is None:
        raise ValueError(f"drafter {drafter}: no algorithm serves draft_tree.kind {tree!r} of a {info.kind} drafter")
    return found


def family_of(algorithm: str) -> str:
    """What one running engine serves: drafters of a family can be swapped for each other."""
    return "last_hidden" if algorithm in ALGORITHMS and algorithm != "SPECFORMER" else algorithm.lower()


def fixed_body(algorithm: str, info: CheckpointInfo) -> object:
    """What cannot be swapped of a drafter: the body of SGLang's models, which are built with the engine; else None."""
    return None if family_of(algorithm) == "last_hidden" else info.body


def checked_info(path: str, algorithm: str) -> CheckpointInfo:
    """The config of a drafter for an algorithm of ours. Raises ValueError where it is for another one."""
    info, serves = read_info(path), ALGORITHMS[algorithm]
    if info.kind not in serves.drafters:
        raise ValueError(
            f"--speculative-algorithm {algorithm} serves drafters of kind {' or '.join(serves.drafters)}, but {path} "
            f"is of kind {info.kind}; use {algorithm_of(path, topk=0)}, or another drafter"
        )
    if serves.tree is not None and info.tree is not None and info.tree.get("kind") != serves.tree:
        raise ValueError(
            f"--speculative-algorithm {algorithm} serves trees of kind {serves.tree}, but that of {path} is of kind "
            f"{info.tree.get('kind')}; use {algorithm_of(path, topk=0)}, or another drafter"
        )
    return info
