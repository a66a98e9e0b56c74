"""What /proc says of processes. An ended one has no words: empty answers, never an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def environments() -> Iterator[tuple[int, bytes]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                yield int(entry.name), (entry / "environ").read_bytes()
            except OSError:
                continue


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")[0]
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """False for a zombie too: where nobody reaps orphans, an ended daemon stays one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
