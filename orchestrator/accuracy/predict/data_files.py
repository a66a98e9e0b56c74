"""Reads the CSV files of published figures in this folder."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path


def records(file_name: str) -> Iterator[dict[str, str]]:
    """Yields the lines of a file as dictionaries by column, without the blank cells. Lines that
    begin with "#" are comments."""
    with Path(__file__).with_name(file_name).open(newline="") as file:
        lines = (line for line in file if not line.startswith("#"))
        for cells in csv.DictReader(lines):
            yield {column: cell for column, cell in cells.items() if cell}
