"""How much the tests try: on every commit what shows a break (`make test`), by RAYSPEC_TESTS=full everything
(`make test-full`). RAYSPEC_TESTS=gpu is of the card alone (conftest.py).

What is tried with less is named where it is: `volume(all_of_it, enough_to_see_a_break)`.
"""

import os

IS_FULL = os.environ.get("RAYSPEC_TESTS") == "full"


def volume(full: int, quick: int) -> int:
    return full if IS_FULL else quick
