"""Reads and writes a user's own schedule as text: one row per rank, one action per cell.

The text is CSV as torch's pipelining writes it (`0F0,0F1,,0B0`; empty cells are idle slots without
meaning), or JSON: a list of such lists, or an object `{"rows": [...], "name": ..., "copies": 2}`.
The placement of stages follows from the rows. Sends and receives in the table are ignored: `lower`
derives them.
"""

from __future__ import annotations

from .actions import COMPUTE, Action, ScheduleError, parse_action
from .schedule import Schedule
from .validate import problem


def read_table(
    source: str,
    name: str = "table",
    max_in_flight: float | None = None,
) -> Schedule:
    """Parses and checks a table. Raises ScheduleError with the row and cell that are wrong."""
    import csv  # imports of csv and json take a millisecond, and few plans have a table
    import io
    import json

    copies = 1
    if source.lstrip().startswith(("[", "{")):
        try:
            rows = json.loads(source)
        except ValueError as error:
            raise ScheduleError(f"schedule {name}: not JSON: {error}") from None
        if isinstance(rows, dict):
            name = rows.get("name", name)
            copies = rows.get("copies", 1)
            rows = rows.get("rows")
    else:
        rows = list(csv.reader(io.StringIO(source.strip())))
    if not isinstance(name, str) or copies not in (1, 2):
        raise ScheduleError(f"schedule {name}: name is text and copies is 1 or 2, not {copies!r}")
    return read_rows(rows, name, copies, max_in_flight)


def read_rows(
    rows: object,
    name: str = "table",
    copies: int = 1,
    max_in_flight: float | None = None,
) -> Schedule:
    """Checks one list of action texts per rank. Raises ScheduleError like `read_table`."""
    if not (isinstance(rows, list) and rows and all(isinstance(row, list) for row in rows)):
        raise ScheduleError(f"schedule {name}: want one row of actions per rank")
    schedule = _assemble(
        name,
        copies,
        [_row(name, rank, row) for rank, row in enumerate(rows)],
    )
    wrong = problem(schedule, max_in_flight)
    if wrong:
        raise ScheduleError(wrong)
    return schedule


def write_table(schedule: Schedule) -> str:
    """Formats a schedule with one model copy as CSV that `read_table` reads."""
    return "".join(",".join(map(str, order)) + "\n" for order in schedule.orders)


def _row(name: str, rank: int, row: list[str]) -> tuple[Action, ...]:
    actions = []
    for cell, cell_text in enumerate(row):
        if cell_text is None or cell_text == "":
            continue
        try:
            action = parse_action(cell_text if isinstance(cell_text, str) else repr(cell_text))
        except ScheduleError as error:
            raise ScheduleError(f"schedule {name}, row {rank}, cell {cell}: {error}") from None
        if action.kind in COMPUTE:
            actions.append(action)
    return tuple(actions)


def _assemble(name: str, copies: int, orders: list[tuple[Action, ...]]) -> Schedule:
    owner: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            if owner.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"schedule {name}: stage {action.stage} is on ranks {owner[action.stage]} and"
                    f" {rank}"
                )
    ranks = len(orders)
    stages = len(owner)
    if sorted(owner) != list(range(stages)) or not stages or stages % (ranks * copies):
        want = f"0 to a multiple of {ranks * copies} less one"
        raise ScheduleError(
            f"schedule {name}: {ranks} rows name stages {sorted(owner)}; want {want}"
        )
    micro_batches = 1 + max(action.micro_batch for order in orders for action in order)
    placement = tuple(owner[stage] for stage in range(stages))
    return Schedule(
        name=name,
        pp=ranks,
        vpp=stages // (ranks * copies),
        micro_batches=micro_batches,
        stage_rank=placement,
        orders=tuple(orders),
    )
