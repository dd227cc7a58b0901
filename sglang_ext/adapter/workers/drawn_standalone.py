"""Allows drawn drafts under STANDALONE. SGLang refuses them, as it takes its draft loop to have no distribution to
verify them with; our loop has one for every drafter of ours (`draft_worker.draft_forward`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_ext.drafters.checkpoint_config import is_language_model, read_config


def offer_drawn_drafts(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    """AROUND SpeculativeAlgorithm.handle_server_args: an independent drafter may draw its chain. Raises ValueError for
    what goes with drawn drafts under no algorithm."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    asked = resolving_view(server_args)
    draws = algorithm.is_standalone() and asked.speculative_use_rejection_sampling
    if not draws or not _is_ours(asked.speculative_draft_model_path):
        return original(algorithm, server_args)
    if asked.speculative_eagle_topk not in (None, 1):
        raise ValueError(
            "--speculative-use-rejection-sampling draws a chain, but --speculative-eagle-topk is "
            f"{asked.speculative_eagle_topk}; make it 1, or leave rejection sampling out"
        )
    check_thresholds(asked)
    declare_resolution(server_args, "rayspec", speculative_use_rejection_sampling=False)
    result = original(algorithm, server_args)
    declare_resolution(server_args, "rayspec", speculative_use_rejection_sampling=True)
    return result


def check_thresholds(asked: Any) -> None:
    """Raise ValueError for accept thresholds beside drawn drafts. SGLang refuses the two under EAGLE: a threshold would
    be held against the chance of acceptance, and what is accepted beyond that is not the target's law."""
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if (given := getattr(asked, name)) != 1.0:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} does not go with drawn drafts (got {given}); leave it at 1.0")


def _is_ours(drafter: str | None) -> bool:
    return drafter is not None and Path(drafter).is_dir() and not is_language_model(read_config(drafter))
