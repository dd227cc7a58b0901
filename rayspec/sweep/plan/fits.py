"""Whether a drafter fits the target, the engines and the shape that a sweep asks for. The engine's start
would say the same, minutes later."""

import torch

from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.sampling import check_can_be_drawn
from rayspec.sweep.shape import DraftShape
from rayspec.target import TargetModel
from sglang_ext.adapter.algorithms import fixed_body
from sglang_ext.adapter.served_target import check_taps
from sglang_ext.drafters.checkpoint_config import CheckpointInfo, empty_drafter, naming
from sglang_ext.drafters.target import TargetInfo, default_taps, tokenizer_sha256
from sglang_ext.heads import build_head


def check_fits(info: CheckpointInfo, shape: DraftShape, config: SweepConfig, target: TargetModel | None) -> None:
    """Raise ValueError where the drafter cannot be served as the sweep asks, or with another target alone."""
    _check_shape(info, shape, config)
    if target is not None:
        _check_target(info, config, target)


def _check_shape(info: CheckpointInfo, shape: DraftShape, config: SweepConfig) -> None:
    steps, most = max(config.draft_steps), info.body.max_draft_steps
    if most is not None and steps > most:
        raise ValueError(
            f"drafter {info.path} drafts {most} positions, but draft_steps is {config.draft_steps}; lower it"
        )
    if shape.topk == 1:
        return
    with naming(info.path), torch.device("meta"):
        head = build_head(info.head, hidden_size=info.body.hidden_size, vocab_size=info.body.vocab_size)
        fewest = shape.topk if head.scores_by_map else head.fewest_candidates(steps)
        tree = empty_drafter(info).draft_tree
    check_can_be_drawn(config, shape.topk, tree)
    if fewest < shape.topk:
        raise ValueError(
            f"drafter {info.path} has a head that may score as few as {fewest} tokens, but topk is {shape.topk}; "
            "lower it"
        )
    if not info.body.expands_tree:
        if tree is None:
            raise ValueError(f"drafter {info.path} has no draft_tree; serve it as a chain, with @chain behind its name")
        for draft_steps in config.draft_steps:
            found, nodes = tree.most_nodes(draft_steps, shape.topk), shape.verified(draft_steps)
            if found < nodes:
                raise ValueError(
                    f"the draft_tree of {info.path} has {found} nodes within {draft_steps} draft steps and topk "
                    f"{shape.topk}, but num_draft_tokens is {nodes}; lower it"
                )
    if tree is not None and shape.verified(steps) < tree.fewest_nodes(steps):
        raise ValueError(
            f"the draft_tree of {info.path}, of kind {tree.kind}, needs num_draft_tokens of at least "
            f"{tree.fewest_nodes(steps)} for {steps} draft steps, got {shape.verified(steps)}; raise it, "
            "or lower draft_steps"
        )


def _check_target(info: CheckpointInfo, config: SweepConfig, target: TargetModel) -> None:
    layers, taps = target.config.num_hidden_layers, info.body.tap_layers
    served = TargetInfo(
        name=config.target,
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        tokenizer_sha256=tokenizer_sha256(target.tokenizer),
        tap_layers=default_taps(layers) if taps is None else taps,
    )
    if info.target is None:  # a stock drafter, which names none
        for name in ("hidden_size", "vocab_size"):
            own, theirs = getattr(info.body, name), getattr(served, name)
            if own != theirs:
                raise ValueError(
                    f"drafter {info.path} has {name} {own}, but target={config.target} has {theirs}; it is another's"
                )
    else:
        info.target.check_served_with(served, info.path)
    check_taps(served, layers, with_output=info.body.taps_output)
    context = config.engine.context_length or target.context_length
    if context is not None and fixed_body(info) is not None:
        longest = info.body.max_position_embeddings
        if context > longest:
            raise ValueError(
                f"drafter {info.path} was made for {longest} tokens, but the engines have {context}; set "
                f"engine.context_length to {longest} or less"
            )
