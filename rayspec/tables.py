"""Tables as Markdown that also reads well in a terminal."""

import re
from collections.abc import Sequence

NUMBER = re.compile(r"[-+]?[\d.]+%?(x( \[.*\])?)?")  # 0.95, 12%, 1.18x [1.10, 1.27]
NO_NUMBER = ("", "-", "baseline", "FAILED")  # in a column of numbers


def render_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, those of numbers to the right."""
    columns = [[row[i] for row in rows] for i in range(len(headers))]
    widths = [max(map(len, [header, *column])) for header, column in zip(headers, columns, strict=True)]
    is_right = [all(cell in NO_NUMBER or NUMBER.fullmatch(cell) for cell in column) for column in columns]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, is_right, strict=True)
        )
        return "| " + " | ".join(aligned) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, is_right, strict=True)) + "|"
    return "\n".join([line(headers), rule, *(line(row) for row in rows)])
