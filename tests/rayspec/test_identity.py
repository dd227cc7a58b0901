"""What was made from something else is told from what was made from the same."""

from rayspec.identity import Difference, differences


def test_every_key_of_either_is_compared() -> None:
    assert differences({"a": 1, "b": [2], "gone": 0}, {"b": [2], "a": 3, "new": None}) == [
        Difference("a", 1, 3),
        Difference("gone", 0, None),
    ]
    assert differences({"a": {"b": 1}}, {"a": {"b": 1}}) == []
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == [("a.c", 2, 3)]
    assert differences({"a": {"b": 1}}, {"a": None}) == [("a", {"b": 1}, None)]


def test_only_these_keys() -> None:
    assert differences({"a": 1, "b": 1}, {"a": 2, "c": 2}, keys=["b", "c"]) == [("b", 1, None), ("c", None, 2)]
