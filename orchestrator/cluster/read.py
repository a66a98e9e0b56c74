"""Reads a topology from a file of any known format, which is recognised by its content."""

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


def recognise(content: str) -> str | None:
    """Returns the format of a text, None if it is none of `FORMATS`."""
    start = content[: 1 << 16]
    if re.search(r'^\s*"?schema"?\s*:', start, re.M) or '"schema"' in start[:200]:
        return "orch"
    is_object = start.lstrip().startswith("{")
    if is_object and re.search(r'"kind"\s*:\s*"(Node)?List"|"metadata"', start):
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
    """Reads a file's text. Raises OrchError (65) if it does not exist, is not text or is too
    large."""
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
    content: str,
    format: str | None = None,
    name: str | None = None,
    profile: str | kubernetes.Profile = "auto",
) -> Topology:
    """Parses text of any of `FORMATS`. `name`: which of several topologies; `profile`: the
    profile of Kubernetes labels."""
    format = format or recognise(content)
    if format is None:
        formats = ", ".join(FORMATS)
        problem = f"not a topology of a known form ({formats})"
        raise OrchError(f"{problem}; `--format` says which it is", Exit.CONFIG)
    if format not in FORMATS:
        raise OrchError(f"no format {format!r}; {did_you_mean(format, FORMATS)}", Exit.CONFIG)
    if format == "orch":
        return document.parse_document(content, name)
    if format == "slurm":
        topology = slurm.parse_topology(content, name)
    elif format == "slurm-nodes":
        topology = Topology("flat", (), machines=machines(parse_nodes(content)))
    elif format == "kubernetes":
        topology = kubernetes.parse_nodes(content, profile)
    else:
        topology = infiniband.parse_ibnetdiscover(content)
    return structs.replace(topology, name=name or "cluster")


def read(
    path: Path,
    format: str | None = None,
    name: str | None = None,
    profile: str | kubernetes.Profile = "auto",
) -> Topology:
    """Reads a file. Raises OrchError (65) whose line begins with the file's name."""
    content = read_text(path)
    try:
        return parse(content, format, name, profile)
    except OrchError as error:
        raise OrchError(f"{path}: {error.message}", error.exit) from None


def merge(views: list[Topology]) -> Topology:
    """Merges several views of the same nodes: switches of one, machines of another. For a machine
    the later view wins.

    Raises OrchError (65) if two of them name switches.
    """
    switched = [view for view in views if view.tiers]
    if len(switched) > 1:
        raise OrchError("two of the files name switches; give one of them", Exit.CONFIG)
    base = switched[0] if switched else views[0]
    machines: dict[str, Machine] = {}
    domains: dict[str, tuple[str, ...]] = {}
    for view in views:
        machines |= view.machines
        domains |= view.domains
    return structs.replace(base, machines=machines, domains=domains)
