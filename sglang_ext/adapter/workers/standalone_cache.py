"""What a prefix of STANDALONE is matched by.

A drafter reads the ids shifted by one: the slot of a token in its cache holds the token that follows. EAGLE's prefixes
are therefore matched by pairs of neighbours. SGLang matches STANDALONE's by single tokens, so that a prompt that came
before brings the drafter's memory of what followed it then. Verification hides that, acceptance pays for it.
"""

from collections.abc import Callable
from typing import Any


def match_pairs(original: Callable[..., Any], context: Any) -> Any:
    """AROUND kv_cache_builder.create_tree_cache: STANDALONE takes EAGLE's rule."""
    from sglang.srt.runtime_context import get_spec

    if (get_spec().speculative_algorithm or "").upper() == "STANDALONE":
        assert context.params.is_eagle is False, "SGLang chose otherwise before"
        context.params.is_eagle = True
    return original(context)
