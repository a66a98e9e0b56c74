"""`nvidia-smi topo -m` -> who is near whom inside one node: NVLink islands, and the NIC nearest to each GPU. Pure."""

from __future__ import annotations

import re

from msgspec import Struct

from orchestrator.cluster.model import bad

WHERE = "nvidia-smi topo -m"
#: Nearest first (the tool's own legend): one PCIe bridge, several, one host bridge, one NUMA node, across sockets.
NEAR = ("PIX", "PXB", "PHB", "NODE", "SYS")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_NVLINK = re.compile(r"NV[0-9]+\Z")
_CELL = re.compile(r"X\Z|NV[0-9]+\Z|PIX\Z|PXB\Z|PHB\Z|NODE\Z|SYS\Z|PSB\Z|SOC\Z|N/A\Z")


class NodeLinks(Struct, frozen=True):
    """Indices are local: GPU i, NIC j (the tool's order)."""

    gpus: int
    nics: tuple[str, ...]  # device names where the tool gave a legend, else NIC0, NIC1, ...
    nvlinks: tuple[tuple[int, ...], ...]  # [gpu][gpu]: links between the two, 0 = none
    distance: tuple[tuple[str, ...], ...]  # [gpu][nic]: PIX ... SYS
    numa: tuple[int | None, ...]  # of each GPU

    @property
    def islands(self) -> list[list[int]]:
        """GPUs that reach one another over NVLink; eight in one island on NVSwitch machines."""
        left, found = set(range(self.gpus)), []
        while left:
            group, todo = set(), [min(left)]
            while todo:
                gpu = todo.pop()
                if gpu not in group:
                    group.add(gpu)
                    todo += [other for other, count in enumerate(self.nvlinks[gpu]) if count]
            left -= group
            found.append(sorted(group))
        return found

    @property
    def nearest_nics(self) -> list[list[int]]:
        """For each GPU the NICs at its smallest distance."""
        result = []
        for row in self.distance:
            best = min((NEAR.index(word) for word in row), default=0)
            result.append([nic for nic, word in enumerate(row) if NEAR.index(word) == best])
        return result

    @property
    def nic_of(self) -> list[int] | None:
        """One NIC a GPU so that near ones are used and none twice while another is free; None without NICs."""
        if not self.nics:
            return None
        used = [0] * len(self.nics)
        result = []
        for row in self.distance:
            nic = min(range(len(row)), key=lambda j: (NEAR.index(row[j]), used[j], j))
            used[nic] += 1
            result.append(nic)
        return result


def parse_topo(text: str) -> NodeLinks:
    """The matrix of one node. Raises OrchError (65) naming the row that is not a row of it."""
    lines = _ESCAPE.sub("", text).splitlines()
    start = next((i for i, line in enumerate(lines) if line.split()[:1] == ["GPU0"] and " X " not in f" {line} "), None)
    if start is None:
        raise bad(WHERE, "no line that starts with GPU0 heads a matrix")
    head = re.split(r"\s{2,}|\t+|\s", lines[start].strip())
    columns = [word for word in head[: _first_text(head)] if word]
    gpus = [word for word in columns if re.fullmatch(r"GPU[0-9]+", word)]
    nics = columns[len(gpus) :]
    if columns[: len(gpus)] != [f"GPU{i}" for i in range(len(gpus))]:
        raise bad(WHERE, f"line {start + 1}: columns are {' '.join(columns[:4])} ..., not GPU0 GPU1 ...")
    rows: dict[str, list[str]] = {}
    numa: dict[str, int | None] = {}
    for number, line in enumerate(lines[start + 1 :], start + 2):
        words = line.split()
        if not words or words[0] not in columns:
            if rows and not words:
                break
            continue
        cells = words[1 : len(columns) + 1]
        wrong = next((cell for cell in cells if not _CELL.match(cell)), None)
        if wrong is not None or len(cells) != len(columns) or words[0] in rows:
            why = "stands there twice" if words[0] in rows else f"has {wrong!r}" if wrong else f"has {len(cells)} cells"
            raise bad(
                WHERE, f"line {number}: row {words[0]} {why}; {len(columns)} of X, NV#, {', '.join(NEAR)} belong there"
            )
        rows[words[0]] = cells
        rest = words[len(columns) + 1 :]
        numa[words[0]] = int(rest[1]) if len(rest) > 1 and rest[1].isdigit() else None
    missing = [gpu for gpu in gpus if gpu not in rows]
    if missing:
        raise bad(WHERE, f"row {missing[0]} is missing")
    legend = dict(re.findall(r"^\s*(NIC[0-9]+):\s*(\S+)\s*$", "\n".join(lines), re.M))
    width = len(gpus)
    return NodeLinks(
        gpus=width,
        nics=tuple(legend.get(nic, nic) for nic in nics),
        nvlinks=tuple(tuple(int(c[2:]) if _NVLINK.match(c) else 0 for c in rows[gpu][:width]) for gpu in gpus),
        distance=tuple(tuple(c if c in NEAR else "SYS" for c in rows[gpu][width:]) for gpu in gpus),
        numa=tuple(numa[gpu] for gpu in gpus),
    )


def _first_text(head: list[str]) -> int:
    """Where the columns that are no devices begin: `CPU Affinity`, `NUMA Affinity`, `GPU NUMA ID`."""
    return next((i for i, word in enumerate(head) if word in ("CPU", "NUMA", "GPU")), len(head))
