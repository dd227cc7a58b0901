"""What a client calls its requests ends none of those of others."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.adapter.routes import abort_alone, check_route

OTHERS = ["a3c1", "job-10", "job-1"]


@pytest.mark.parametrize(
    ("aborted", "ended"),
    [("job-10", ["job-10"]), ("job-1", []), ("a", []), ("a3c1", ["a3c1"]), ("unknown", ["unknown"])],
)
def test_an_abort_ends_the_request_of_this_name_alone(aborted: str, ended: list[str]) -> None:
    """SGLang's scheduler ends each one that begins with it."""
    done: list[str] = []
    manager = SimpleNamespace(rid_to_state=dict.fromkeys(OTHERS))
    abort_alone(lambda _, rid, __: done.append(rid), manager, aborted)
    assert done == ended


def test_all_requests_are_still_aborted_where_the_server_asks_for_it() -> None:
    done: list[Any] = []
    manager = SimpleNamespace(rid_to_state=dict.fromkeys(OTHERS))
    abort_alone(lambda *given: done.append(given[1:]), manager, abort_all=True)
    assert done == [("", True)]


@pytest.mark.parametrize("names", ["HEALTH_CHECK", ["a", "HEALTH_CHECK_1"]])
def test_a_request_that_calls_itself_a_health_check_is_refused(names: Any) -> None:
    """A busy scheduler drops it without an answer."""
    given: list[Any] = []
    asked = SimpleNamespace(rid=names)
    for request in (at("/v1/completions"), None):  # None: of an engine in this process
        with pytest.raises(ValueError, match="rid must not begin with HEALTH_CHECK"):
            check_route(lambda *args: given.append(args), None, asked, request)
    for request in (at("/health"), at("/health_generate")):
        check_route(lambda *args: given.append(args), None, asked, request)
    assert given == [(None, asked, at("/health")), (None, asked, at("/health_generate"))]


def at(path: str) -> Any:
    return SimpleNamespace(url=SimpleNamespace(path=path))
