"""Drawn drafts under STANDALONE, which SGLang refuses: its loop is taken to have no law to verify them with, but ours
has one for every drafter of ours (`draft_worker.draft_forward`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_ext.drafters.checkpoint import is_language_model, read_config


def offer_drawn_drafts(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    """AROUND SpeculativeAlgorithm.handle_server_args: an independent drafter may draw its chain. Raises ValueError for
    what goes with drawn drafts under no algorithm."""
    path = server_args.speculative_draft_model_path
    is_ours = path is not None and Path(path).is_dir() and not is_language_model(read_config(path))
    if not (algorithm.is_standalone() and server_args.speculative_use_rejection_sampling and is_ours):
        return original(algorithm, server_args)
    if server_args.speculative_eagle_topk not in (None, 1):
        raise ValueError(
            "--speculative-use-rejection-sampling draws a chain, but --speculative-eagle-topk is "
            f"{server_args.speculative_eagle_topk}; make it 1, or leave rejection sampling out"
        )
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if getattr(server_args, name) != 1.0:
            raise ValueError(
                f"--{name.replace('_', '-')} has no effect on drawn drafts (got {getattr(server_args, name)}); "
                "leave it at 1.0"
            )
    server_args.speculative_use_rejection_sampling = False
    try:
        return original(algorithm, server_args)
    finally:
        server_args.speculative_use_rejection_sampling = True
