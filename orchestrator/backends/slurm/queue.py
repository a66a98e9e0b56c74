"""Asking Slurm about many jobs at once, and reading the answers. Pure: argument lists and parsers, no calls.

One `squeue` (and, where the site accounts, one `sacct`) serves all runs. Fields are separated by the ASCII unit
separator, which no value holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from msgspec import Struct, structs

from orchestrator.cluster.hostlist import expand

_SEP = "\x1f"
_SQUEUE = ("%i", "%T", "%r", "%S", "%e", "%D", "%N", "%P", "%j", "%k")
_SACCT = ("JobID", "State", "ExitCode", "Start", "End", "NNodes", "NodeList", "Partition", "JobName")


class Job(Struct, frozen=True, kw_only=True):
    """One job as Slurm sees it. Times are local ISO-8601 text as Slurm prints them, "" when unknown."""

    id: str  # `7`, or `7_2` for a member of an array
    state: str
    reason: str = ""
    start: str = ""  # began, or is expected to begin
    end: str = ""
    nodes: int = 0
    node_names: tuple[str, ...] = ()
    partition: str = ""
    name: str = ""
    exit_code: int | None = None  # of the batch script; negative: the signal that killed it
    source: str = "squeue"


def squeue_argv(user: str | None = None) -> list[str]:
    """All jobs that the controller remembers, ended ones (MinJobAge) included.

    Job ids are not named: one that the controller has forgotten would fail the whole call.
    """
    who = [f"--user={user}"] if user else ["--me"]
    return ["squeue", *who, "--noheader", "--array", "--states=all", f"--format={_SEP.join(_SQUEUE)}"]


def sacct_argv(ids: Iterable[str]) -> list[str]:
    """The last life of each job, whatever its age."""
    fields = ",".join(_SACCT)
    wanted = ",".join(sorted(ids, key=id_key))
    return ["sacct", "-X", "-n", "-P", f"--delimiter={_SEP}", f"--format={fields}", f"--jobs={wanted}"]


def parse_squeue(text: str) -> dict[str, Job]:
    jobs = {}
    for row in _rows(text, len(_SQUEUE)):
        id_, state, reason, start, end, nodes, names, partition, name, _ = row
        jobs[id_] = Job(
            id=id_, state=state, reason="" if reason == "None" else reason, start=_time(start), end=_time(end),
            nodes=_int(nodes), node_names=tuple(expand(names)), partition=partition, name=name,
        )  # fmt: skip
    return jobs


def parse_sacct(text: str) -> dict[str, Job]:
    jobs = {}
    for row in _rows(text, len(_SACCT)):
        id_, state, code, start, end, nodes, names, partition, name = row
        jobs[id_] = Job(
            id=id_, state=state, start=_time(start), end=_time(end), nodes=_int(nodes), partition=partition, name=name,
            node_names=tuple(expand(names)), exit_code=exit_code(code), source="sacct",
        )  # fmt: skip
    return jobs


def merge(live: dict[str, Job], accounted: dict[str, Job]) -> dict[str, Job]:
    """squeue is fresher; what it has forgotten, and the exit code, come from accounting."""
    result = dict(accounted)
    for id_, job in live.items():
        known = accounted.get(id_)
        result[id_] = structs.replace(job, exit_code=known.exit_code) if known and known.state == job.state else job
    return result


def exit_code(text: str) -> int | None:
    """sacct's `code:signal`; a signal is negative, as in `subprocess`."""
    code, _, number = text.partition(":")
    if not code.isdigit():
        return None
    return -int(number) if number.isdigit() and int(number) else int(code)


def id_key(id_: str) -> list[int]:
    """Sorts ids by number, members of an array by their index."""
    return [int(part) for part in id_.split("_")]


def _rows(text: str, width: int) -> Iterable[list[str]]:
    for line in text.splitlines():
        row = line.split(_SEP)
        if len(row) == width and row[0]:
            yield [value.strip() for value in row]


def _time(text: str) -> str:
    try:
        return datetime.fromisoformat(text).isoformat()
    except ValueError:  # N/A, Unknown, None
        return ""


def _int(text: str) -> int:
    return int(text) if text.isdigit() else 0
