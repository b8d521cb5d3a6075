"""Aligned lines for reports."""

from collections.abc import Iterator, Sequence


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The first and last columns to the left, numbers between to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *numbers, last in rows:
        cells = [first.ljust(widths[0])]
        cells += [n.rjust(width) for n, width in zip(numbers, widths[1:-1], strict=True)]
        yield "  ".join([*cells, last]).rstrip()
