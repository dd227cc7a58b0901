"""Which `stop_regex` may be searched for.

SGLang's scheduler searches the end of each answer after every step, with Python's `re`, which tries one way to match
after the other: a pattern with many ways holds up every request of the server, and `re` knows no time limit. So the
ways are counted before.
"""

from collections.abc import Iterable
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

MAX_WORK = 4096  # ways to match times the longest match; some ten milliseconds of a search at worst
OF_ONE_CHARACTER = (kinds.LITERAL, kinds.NOT_LITERAL, kinds.IN, kinds.ANY)


def check_stop_regex(pattern: str) -> None:
    """Raises ValueError for a pattern whose search could take long, and re.error for what is none."""
    ways, longest = _reckoned(_parser.parse(pattern))
    if ways * longest > MAX_WORK:
        raise ValueError(
            f"stop_regex {_short(pattern)} has {_number(ways)} ways to match up to {_number(longest)} characters, more "
            f"than a server may search for after each step ({MAX_WORK} together); give repeats lower limits, or "
            "filter the answer yourself"
        )


def _reckoned(pattern: Iterable[Any]) -> tuple[int, int]:
    """(ways, longest match in characters)."""
    ways, longest = 1, 0
    for kind, value in pattern:
        if kind in OF_ONE_CHARACTER:
            own = (1, 1)
        elif kind is kinds.AT:  # ^, $, \b
            own = (1, 0)
        elif kind is kinds.SUBPATTERN:
            own = _reckoned(value[-1])
        elif kind is kinds.BRANCH:
            branches = [_reckoned(branch) for branch in value[1]]
            own = (sum(w for w, _ in branches), max(length for _, length in branches))
        elif kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT):
            own = _repeated(*value)
        else:
            raise ValueError(
                f"stop_regex may hold characters, sets, groups, alternatives and repeats, but no {str(kind).lower()}"
            )
        # what was over the limit stays over it, and numbers stay small
        ways, longest = min(ways * own[0], 2 * MAX_WORK), min(longest + own[1], 2 * MAX_WORK)
    return ways, longest


def _repeated(fewest: int, most: int, inner: Iterable[Any]) -> tuple[int, int]:
    if most == kinds.MAXREPEAT:
        raise ValueError(
            "stop_regex has a repeat without an upper limit, which is searched for in all of the answer after each "
            "step; give one, such as {1,20} for + or {0,20} for *"
        )
    ways, longest = _reckoned(inner)
    most = min(most, 2 * MAX_WORK)
    if ways == 1:
        return most - min(fewest, most) + 1, most * longest
    total = 0
    for count in range(min(fewest, most), most + 1):
        total += ways**count if count < MAX_WORK.bit_length() else 2 * MAX_WORK
        if total > MAX_WORK:
            break
    return total, most * longest


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _number(count: int) -> str:
    return str(count) if count <= MAX_WORK else f"over {MAX_WORK}"
