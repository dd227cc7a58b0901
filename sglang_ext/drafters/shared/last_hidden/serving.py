"""What serves every drafter that reads the target's last hidden state alone: a worker without a draft model."""

from collections.abc import Mapping

from sglang_ext.drafters.serving import Serving


def served_by(*, chain: str, trees: Mapping[str | None, str]) -> Serving:
    return Serving(
        chain=chain,
        trees=trees,
        algorithm="sglang_ext.adapter.spec_algorithm:LastHiddenAlgorithm",
        worker="last_hidden",
    )
