"""Kernels run compiled where there is a GPU and in Triton's interpreter elsewhere; the tests are the same."""

from collections.abc import Iterator

import pytest
import shared_fixtures  # noqa: F401  (defines kernels so that they can be interpreted, before others import them)
import torch


@pytest.fixture(autouse=True)
def _interpreted(interpreter: None) -> None: ...


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN, or the largest integer, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan().all(), "torch no longer fills uninitialised memory in this mode"
    yield
    torch.use_deterministic_algorithms(False)
