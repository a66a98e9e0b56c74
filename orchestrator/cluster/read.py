"""A file of any known format -> topology. The format is recognised by the content."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import structs

from orchestrator.errors import OrchError, did_you_mean
from orchestrator.plan.exits import Exit

from . import document
from .importers import infiniband, kubernetes, slurm
from .importers.slurm_nodes import machines, parse_nodes
from .model import Machine, Topology

MAX_BYTES = 1 << 28
FORMATS = ("orch", "slurm", "slurm-nodes", "kubernetes", "ibnetdiscover")


def recognise(text: str) -> str | None:
    """The format of a text, None when it is none of `FORMATS`."""
    start = text[: 1 << 16]
    if re.search(r'^\s*"?schema"?\s*:', start, re.M) or '"schema"' in start[:200]:
        return "orch"
    if start.lstrip().startswith("{") and re.search(
        r'"kind"\s*:\s*"(Node)?List"|"metadata"', start
    ):
        return "kubernetes"
    if re.search(r"^NodeName=", start, re.M) or re.search(r'\A\s*\{.*"nodes"\s*:', start, re.S):
        return "slurm-nodes"
    if re.search(r'^(Switch|Ca|Hca)\s+[0-9]+\s+"[SH]-', start, re.M):
        return "ibnetdiscover"
    if re.search(r"^\s*(SwitchName|BlockName|RingName|BlockSizes)=", start, re.M | re.I):
        return "slurm"
    if re.search(r"^\s*-?\s*(topology|tree|block|flat)\s*:", start, re.M):
        return "slurm"
    return None


def read_text(path: Path) -> str:
    """A file's text. Raises OrchError (65) when it is not there, not text or too large."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise OrchError(
                f"{path}: larger than {MAX_BYTES >> 20} MiB, no topology is", Exit.CONFIG
            )
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise OrchError(f"{path}: {error.strerror}", Exit.CONFIG) from None
    except UnicodeDecodeError as error:
        raise OrchError(f"{path}: byte {error.start} is not text (UTF-8)", Exit.CONFIG) from None


def parse(
    text: str,
    format: str | None = None,
    name: str | None = None,
    profile: str | kubernetes.Profile = "auto",
) -> Topology:
    """Text of any of `FORMATS`. `name`: which of several topologies; `profile`: of Kubernetes
    labels."""
    format = format or recognise(text)
    if format is None:
        known = ", ".join(FORMATS)
        raise OrchError(
            f"not a topology of a known form ({known}); `--format` says which it is", Exit.CONFIG
        )
    if format not in FORMATS:
        raise OrchError(f"no format {format!r}; {did_you_mean(format, FORMATS)}", Exit.CONFIG)
    if format == "orch":
        return document.parse_document(text, name)
    if format == "slurm":
        found = slurm.parse_topology(text, name)
    elif format == "slurm-nodes":
        found = Topology("flat", (), machines=machines(parse_nodes(text)))
    elif format == "kubernetes":
        found = kubernetes.parse_nodes(text, profile)
    else:
        found = infiniband.parse_ibnetdiscover(text)
    return structs.replace(found, name=name or "cluster")


def read(
    path: Path,
    format: str | None = None,
    name: str | None = None,
    profile: str | kubernetes.Profile = "auto",
) -> Topology:
    """A file. Raises OrchError (65) whose line begins with the file's name."""
    text = read_text(path)
    try:
        return parse(text, format, name, profile)
    except OrchError as error:
        raise OrchError(f"{path}: {error.message}", error.exit) from None


def merge(parts: list[Topology]) -> Topology:
    """Several views of the same nodes: switches of one, machines of another. The later one wins on
    a machine.

    Raises OrchError (65) when two of them name switches.
    """
    switched = [part for part in parts if part.tiers]
    if len(switched) > 1:
        raise OrchError("two of the files name switches; give one of them", Exit.CONFIG)
    base = switched[0] if switched else parts[0]
    known: dict[str, Machine] = {}
    domains: dict[str, tuple[str, ...]] = {}
    for part in parts:
        known |= part.machines
        domains |= part.domains
    return structs.replace(base, machines=known, domains=domains)
