"""The synthetic sweep of synthetic.py, made once."""

from collections.abc import Callable

import pytest
from synthetic import SyntheticSweep, make_synthetic_sweep, synthetic_request

from rayspec.records import RequestRecord
from rayspec.sweep.record.results import TrialResult


@pytest.fixture
def make_request() -> Callable[..., RequestRecord]:
    return synthetic_request


@pytest.fixture(scope="session")
def synthetic_sweep() -> SyntheticSweep:
    """The shipped heads by name, 2 and 4 draft steps, 1 and 4 streams."""
    return make_synthetic_sweep()


@pytest.fixture(scope="session")
def results(synthetic_sweep: SyntheticSweep) -> list[TrialResult]:
    """A whole sweep's results: 4 heads, 2 and 4 draft steps, 1 and 4 streams."""
    return synthetic_sweep.results
