"""Which patterns the end of an answer may be searched for; through a real server in test_hostile_client.py."""

import re
import time

import pytest

from sglang_ext.adapter.stop_regex import check_stop_regex

GOOD = [
    r"END",
    r"\n\n",
    r"\d{1,3}\.",
    r"(Answer|Result): [a-z]{1,20}",
    r"(?i:stop)$",
    r"^a{300}",
    r"[^a]b?",
    r"(ab|c){3}",
]


@pytest.mark.parametrize("pattern", GOOD)
def test_what_has_few_ways_may_be_searched_for(pattern: str) -> None:
    check_stop_regex(pattern)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("( | | | | | | | | )*b", "without an upper limit"),
        ("a+", r"such as \{1,20\} for \+"),
        ("(a?){3,}b", "without an upper limit"),
        ("(a{0,9}){0,9}b", "ways to match"),
        ("a?" * 40 + "b", "over 4096 ways"),
        ("(ab|cd)" * 40, "over 4096 ways"),
        ("(ab|c){12}b", "has 4096 ways to match up to 25 characters"),
        ("a{5000}", "1 ways to match up to over 4096 characters"),
        (r"(a)\1", "but no groupref"),
        ("(?=a)b", "but no assert"),
    ],
)
def test_what_could_hold_up_the_scheduler_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_stop_regex(pattern)


def test_what_is_no_pattern_is_an_error_of_its_own() -> None:
    with pytest.raises(re.error):
        check_stop_regex("(")


@pytest.mark.parametrize("pattern", ["(a|aa){7}b", "a{0,8}a{0,8}b", "a?" * 7 + "c{2}d{2}e{3}", "(a{0,3}){3}b"])
def test_what_may_be_searched_for_takes_no_time(pattern: str) -> None:
    """At its worst, in an answer ten times as long as the longest match; the limit leaves room for a busy machine."""
    check_stop_regex(pattern)
    begin = time.process_time()
    assert re.search(pattern, "a" * 400) is None
    assert time.process_time() - begin < 2
