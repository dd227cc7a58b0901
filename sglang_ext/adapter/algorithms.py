"""Which speculative algorithm of SGLang serves a drafter, by what its family says (`serving.py`). Imports nothing of
SGLang."""

from collections.abc import Iterator
from pathlib import Path

from sglang_ext.drafters import Family, families, family
from sglang_ext.drafters.checkpoint_config import CheckpointInfo, is_language_model, read_config, read_info
from sglang_ext.drafters.stock import EAGLE

STOCK, STOCK_EAGLE, LANGUAGE_MODEL = "EAGLE3", "EAGLE", "STANDALONE"  # for drafters that SGLang serves by itself


def serving_families(algorithm: str) -> list[Family]:
    """Whose drafters an algorithm serves."""
    return [own for own in families().values() if algorithm in own.serving.names]


def own_algorithms() -> Iterator[tuple[str, str]]:
    """(name, class as `module:Class`) of those that are not SGLang's. Raises ValueError where two classes claim one
    name."""
    found: dict[str, str] = {}
    for own in families().values():
        if own.serving.algorithm is None:
            continue
        for name in own.serving.names:
            if found.setdefault(name, own.serving.algorithm) != own.serving.algorithm:
                raise ValueError(
                    f"the algorithm {name} of the drafter family {own.kind} is {found[name]} already; uninstall one of "
                    "the two families, or give its algorithm another name"
                )
    yield from found.items()


def algorithm_of(drafter: str | Path, topk: int) -> str:
    """The speculative algorithm that serves a drafter: a folder of ours, of a stock EAGLE or EAGLE-3 drafter or of an
    ordinary language model, or a Hugging Face name, which is a stock EAGLE-3 drafter. Raises ValueError for a folder
    that cannot be read."""
    if not Path(drafter).is_dir():
        return STOCK
    config = read_config(drafter)
    if config.get("architectures") == [EAGLE.architecture]:
        return STOCK_EAGLE
    if is_language_model(config):
        return LANGUAGE_MODEL
    return _algorithm(read_info(drafter), topk)


def _algorithm(info: CheckpointInfo, topk: int) -> str:
    serving = family(info.kind).serving
    if topk == 1:
        return serving.chain
    if not serving.trees:
        raise ValueError(f"drafter {info.path}: a {info.kind} drafter is served as a chain; set topk to 1, got {topk}")
    kind = None if info.tree is None else info.tree.kind
    if kind is None and None not in serving.trees:  # it needs a tree and has none, which others say with more words
        return next(iter(serving.trees.values()))
    if kind not in serving.trees:
        raise ValueError(f"drafter {info.path}: no algorithm serves draft_tree.kind {kind!r} of a {info.kind} drafter")
    return serving.trees[kind]


def swap_group(algorithm: str) -> str:
    """What one running engine serves: drafters of a group can be swapped for each other, where their fixed bodies are
    the same."""
    return next((own.serving.worker for own in serving_families(algorithm) if own.serving.worker), algorithm.lower())


def fixed_body(info: CheckpointInfo) -> object:
    """What cannot be swapped of a drafter: a body with a cache, which SGLang builds with the engine; else None."""
    return info.body if info.body.has_cache else None


def checked_info(path: str, algorithm: str) -> CheckpointInfo:
    """The config of a drafter for an algorithm of ours. Raises ValueError where it is for another one."""
    info, kinds = read_info(path), [own.kind for own in serving_families(algorithm)]
    if info.kind not in kinds:
        raise ValueError(
            f"--speculative-algorithm {algorithm} serves drafters of kind {' or '.join(kinds)}, but {path} is of kind "
            f"{info.kind}; use {_usual_algorithm(info)}, or another drafter"
        )
    trees = family(info.kind).serving.tree_kinds(algorithm)
    if trees and info.tree is not None and info.tree.kind not in trees:
        raise ValueError(
            f"--speculative-algorithm {algorithm} serves trees of kind {' or '.join(map(str, trees))}, but that of "
            f"{path} is of kind {info.tree.kind}; use {_usual_algorithm(info)}, or another drafter"
        )
    return info


def _usual_algorithm(info: CheckpointInfo) -> str:
    return _algorithm(info, topk=2 if family(info.kind).serving.trees else 1)
