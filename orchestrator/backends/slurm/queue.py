"""Queries the states of many jobs at once: argument lists of squeue and sacct, and parsers. Pure.

One `squeue` (and one `sacct` where the site has accounting) serves all runs. Fields are separated
by the ASCII unit separator, which no value contains.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from msgspec import Struct, structs

from orchestrator.cluster.hostlist import expand

_SEP = "\x1f"
_SQUEUE = ("%i", "%T", "%r", "%S", "%e", "%D", "%N", "%P", "%j", "%k")
_SACCT = (
    "JobID",
    "State",
    "ExitCode",
    "Start",
    "End",
    "NNodes",
    "NodeList",
    "Partition",
    "JobName",
)


class Job(Struct, frozen=True, kw_only=True):
    """One job as Slurm reports it. Times are local ISO-8601 text, "" when unknown."""

    id: str  # `7`, or `7_2` for a member of an array
    state: str
    reason: str = ""
    start: str = ""  # actual or expected
    end: str = ""
    nodes: int = 0
    node_names: tuple[str, ...] = ()
    partition: str = ""
    name: str = ""
    exit_code: int | None = None  # of the batch script; negative: the signal that killed it
    source: str = "squeue"


def squeue_argv(user: str | None = None) -> list[str]:
    """The command that lists all jobs the controller remembers, ended ones (MinJobAge) included.

    It names no job ids: an id that the controller has forgotten would fail the whole call.
    """
    user_flags = [f"--user={user}"] if user else ["--me"]
    return [
        "squeue",
        *user_flags,
        "--noheader",
        "--array",
        "--states=all",
        f"--format={_SEP.join(_SQUEUE)}",
    ]


def sacct_argv(ids: Iterable[str]) -> list[str]:
    """The command that lists the last attempt of each job, whatever its age."""
    fields = ",".join(_SACCT)
    job_ids = ",".join(sorted(ids, key=id_key))
    return [
        "sacct",
        "-X",
        "-n",
        "-P",
        f"--delimiter={_SEP}",
        f"--format={fields}",
        f"--jobs={job_ids}",
    ]


def parse_squeue(output: str) -> dict[str, Job]:
    jobs = {}
    for row in _rows(output, len(_SQUEUE)):
        id_, state, reason, start, end, nodes, names, partition, name, _ = row
        jobs[id_] = Job(
            id=id_,
            state=state,
            reason="" if reason == "None" else reason,
            start=_time(start),
            end=_time(end),
            nodes=_int(nodes),
            node_names=tuple(expand(names)),
            partition=partition,
            name=name,
        )
    return jobs


def parse_sacct(output: str) -> dict[str, Job]:
    jobs = {}
    for row in _rows(output, len(_SACCT)):
        id_, state, code, start, end, nodes, names, partition, name = row
        jobs[id_] = Job(
            id=id_,
            state=state,
            start=_time(start),
            end=_time(end),
            nodes=_int(nodes),
            partition=partition,
            name=name,
            node_names=tuple(expand(names)),
            exit_code=exit_code(code),
            source="sacct",
        )
    return jobs


def merge(live: dict[str, Job], accounted: dict[str, Job]) -> dict[str, Job]:
    """All jobs of both.

    squeue is fresher and wins; exit codes, and jobs that squeue has forgotten, come from
    accounting.
    """
    result = dict(accounted)
    for id_, job in live.items():
        record = accounted.get(id_)
        if record and record.state == job.state:
            job = structs.replace(job, exit_code=record.exit_code)
        result[id_] = job
    return result


def exit_code(field: str) -> int | None:
    """The exit code in sacct's `code:signal`, None when unknown.

    For a job that a signal killed it is minus the signal's number.
    """
    code, _, number = field.partition(":")
    if not code.isdigit():
        return None
    return -int(number) if number.isdigit() and int(number) else int(code)


def id_key(id_: str) -> list[int]:
    """A sort key: ids by number, members of an array by their index."""
    return [int(number) for number in id_.split("_")]


def _rows(output: str, width: int) -> Iterable[list[str]]:
    for line in output.splitlines():
        row = line.split(_SEP)
        if len(row) == width and row[0]:
            yield [value.strip() for value in row]


def _time(field: str) -> str:
    try:
        return datetime.fromisoformat(field).isoformat()
    except ValueError:  # N/A, Unknown, None
        return ""


def _int(field: str) -> int:
    return int(field) if field.isdigit() else 0
