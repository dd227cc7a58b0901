"""Draft workers whose passes are captured in CUDA graphs, and captured again after a swap."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context

from sglang_ext.adapter.swap import NOT_CAPTURED

logger = logging.getLogger(__name__)


class Captured(ABC):
    """Between hosting a drafter and the end of its capture no request is served."""

    parallel_layout: Any
    refusal: str | None = None  # why no request can be served; an engine refuses them before they come this far
    lost: str | None = None  # why no swap can help

    def _refuse_until_captured(self, path: str) -> None:
        self.refusal = (
            f"the draft passes of {path} {NOT_CAPTURED} (the log says why); swap in another drafter, or start anew, "
            "with a lower --mem-fraction-static if memory was short"
        )

    def check_captured(self) -> None:
        """For a request that was sent before its like were refused: this ends the server."""
        if self.refusal is not None:
            raise RuntimeError(self.refusal)

    def capture(self) -> None:
        """The draft passes of what was hosted. Raises RuntimeError where that fails: no drafter is left, and no request
        may come until a swap succeeds (`engine.swap_drafter` sees to it)."""
        try:
            self._capture_hosted()
        except Exception as error:  # whatever of CUDA's
            logger.exception("capturing the draft passes failed")
            assert self.refusal is not None, "it was hosted"
            raise RuntimeError(self.refusal) from error
        self.refusal = None

    @abstractmethod
    def _capture_hosted(self) -> None:
        """Capture them, in place of those of the drafter before."""

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        with (
            draft_pp_context(),
            draft_tp_context(self.parallel_layout),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            yield
