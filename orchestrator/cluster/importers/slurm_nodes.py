"""Reads the output of `scontrol show nodes`, and which nodes are really free. Pure.

Text (`scontrol -o show nodes -d`, every Slurm since 22.05) and JSON (`scontrol show nodes
--json`, 23.02 and later) give the same values; orch asks for the text form, because the JSON
form changes between versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from orchestrator.cluster.model import NO_GPUS, ONLY_SLICES, GpuCount, Machine
from orchestrator.errors import OrchError
from orchestrator.plan.codec import UNREADABLE
from orchestrator.plan.exits import Exit

#: One character per flag, as `sinfo` and scontrol's short states write them after the base state.
_MARKS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
#: Words that mean the same in different versions and in `sinfo`'s lower case.
_SYNONYMS = {
    "MIX": "MIXED",
    "ALLOC": "ALLOCATED",
    "NO_RESPOND": "NOT_RESPONDING",
    "MAINT": "MAINTENANCE",
}
_SYNONYMS |= {
    "COMP": "COMPLETING",
    "UNK": "UNKNOWN",
    "RESV": "RESERVED",
    "DRAINING": "DRAIN",
    "DRAINED": "DRAIN",
}
#: Flags that do not stop a new job: a planned node is free until the job that it waits for starts,
#: and a node that power saving switched off is switched on for a job.
_HARMLESS = frozenset(
    {"PLANNED", "CLOUD", "DYNAMIC_NORM", "DYNAMIC_FUTURE", "POWERED_DOWN", "POWERING_UP", "IDLE"}
)

#: A type, or the end of one, that is a slice of a GPU: `1g.5gb`, `h100_1g.10gb`, `1c.3g.20gb`,
#: `1g.10gb.me`.
_SLICE = re.compile(r"(?:^|[^a-z0-9])(?:\d+c\.)?\d+g[._]?\d+gb(?:[+._-][a-z.+-]+)?$", re.IGNORECASE)
_IN_BRACKETS = re.compile(r"\([^)]*\)")
_WANTED = frozenset(
    {
        "NodeName",
        "State",
        "Gres",
        "GresUsed",
        "AllocTRES",
        "CPUEfctv",
        "CPUTot",
        "RealMemory",
        "ActiveFeatures",
    }
    | {"Partitions"}
)
_AFTER_REASON = re.compile(r" (?:Comment|Extra)=")


class Node(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    states: frozenset[str]  # Slurm's words: a base state and flags
    gpus: int  # whole GPUs of the first type
    gpus_used: int  # GPUs of all types, slices too
    gpu_type: str  # "" if the site does not type its GPUs
    other_gpus: tuple[GpuCount, ...] = ()  # whole GPUs of further types
    sliced: bool = False  # some of its GPUs are offered as slices only
    cpus: int
    features: frozenset[str]
    partitions: frozenset[str]
    reason: str = ""  # why the site took the node out

    @property
    def free(self) -> bool:
        """Tells whether the node is idle as a whole, and allowed to take a job."""
        return "IDLE" in self.states and self.states <= _HARMLESS and not self.gpus_used

    @property
    def usable(self) -> bool:
        """Tells whether the node is in service; a busy node is usable later."""
        base = {"IDLE", "MIXED", "ALLOCATED", "COMPLETING", "RESERVED"}
        return bool(self.states & base) and self.states <= _HARMLESS | base

    @property
    def state(self) -> str:
        """Returns one readable group of words, base state first: `IDLE+DRAIN`."""
        bases = ("IDLE", "MIXED", "ALLOCATED", "DOWN", "ERROR", "FUTURE", "UNKNOWN")
        return "+".join(sorted(self.states, key=lambda state: (state not in bases, state)))


def machines(nodes: Iterable[Node], idle: bool = False) -> dict[str, Machine]:
    """Returns what is known of the nodes. A node is free if it is in service, with `idle` if it is
    idle as a whole.

    If some nodes have whole GPUs, those without any cannot take a job.
    """
    nodes = list(nodes)
    some_have_gpus = any(node.gpus for node in nodes)
    return {node.name: _machine(node, idle, some_have_gpus) for node in nodes}


def _machine(node: Node, idle: bool, some_have_gpus: bool) -> Machine:
    if not (node.free if idle else node.usable):
        reason = node.state if idle or not node.reason else f"{node.state}: {node.reason}"
    elif not node.gpus and node.sliced:
        reason = ONLY_SLICES
    else:
        reason = NO_GPUS if some_have_gpus and not node.gpus else ""
    return Machine(
        gpus=node.gpus,
        gpu=node.gpu_type,
        other_gpus=node.other_gpus,
        free=not reason,
        reason=reason,
    )


def parse_state(states_word: str) -> frozenset[str]:
    """Parses `IDLE+DRAIN`, `idle*`, `mixed-` or `DOWN*+DRAIN` into a set of full words."""
    states: set[str] = set()
    for state in states_word.split("+"):
        bare = state.rstrip("".join(_MARKS))
        states.update(_MARKS[mark] for mark in state[len(bare) :])
        bare = bare.upper()
        states.add(_SYNONYMS.get(bare, bare))
    return frozenset(states - {""})


def parse_nodes(content: str) -> list[Node]:
    """Parses nodes of `scontrol show nodes` in any of its forms: one line per node, indented
    blocks, JSON.

    Raises OrchError (65) if there is no node, or if a node lacks its name or state.
    """
    stripped = content.lstrip()
    nodes = (
        _from_json(stripped)
        if stripped.startswith("{")
        else [_from_text(block) for block in _blocks(stripped)]
    )
    if not nodes:
        raise OrchError("`scontrol show nodes` names no node", Exit.CONFIG)
    return nodes


def select(
    nodes: Iterable[Node],
    partition: str | None = None,
    constraint: str | None = None,
) -> list[Node]:
    """Returns the nodes of a partition that have all features of a plain `a&b` constraint.

    A constraint with other operators is left to Slurm: it does not narrow the list here.
    """
    features = (
        frozenset(constraint.split("&"))
        if constraint and not re.search(r"[|\[\]()*!]", constraint)
        else frozenset()
    )
    return [
        n for n in nodes if (not partition or partition in n.partitions) and features <= n.features
    ]


def _blocks(content: str) -> Iterable[str]:
    """Yields each node's fields on one line, whatever the form."""
    for block in re.split(r"(?:^|\n)(?=NodeName=)", content):
        if block.strip():
            yield " ".join(line.strip() for line in block.splitlines())


def _fields(block: str) -> dict[str, str]:
    """Returns the wanted `Key=value` pairs. None of their values contains a blank; Reason, which
    is last, may contain anything."""
    block, _, reason = block.partition(" Reason=")
    fields = {"Reason": _AFTER_REASON.split(reason, 1)[0].strip()}
    for pair in block.split():
        key, _, value = pair.partition("=")
        if key in _WANTED:
            fields.setdefault(key, value)
    return fields


def _from_text(block: str) -> Node:
    fields = _fields(block)
    if "NodeName" not in fields or "State" not in fields:
        raise OrchError(f"not a node of `scontrol show nodes`: {block[:80]!r}", Exit.CONFIG)
    used = fields.get("GresUsed")
    in_use = _tres_gpus(fields.get("AllocTRES", "")) if used is None else _total(parse_gres(used))
    return _node(
        parse_gres(fields.get("Gres", "")),
        name=fields["NodeName"],
        states=parse_state(fields["State"]),
        gpus_used=in_use,
        cpus=_number(fields.get("CPUEfctv") or fields.get("CPUTot")),
        features=_words(fields.get("ActiveFeatures")),
        partitions=_words(fields.get("Partitions")),
        reason=fields["Reason"],
    )


class _JsonNode(msgspec.Struct):
    """The keys that all versions with `--json` share; some became lists in 23.11, so both
    spellings are accepted."""

    name: str
    state: list[str] | str
    state_flags: list[str] = []
    gres: str = ""
    gres_used: str = ""
    cpus: int = 0
    active_features: list[str] | str = []
    partitions: list[str] = []
    reason: str = ""


class _JsonNodes(msgspec.Struct):
    nodes: list[_JsonNode]


def _from_json(content: str) -> list[Node]:
    try:
        json_nodes = msgspec.json.decode(content.encode(), type=_JsonNodes).nodes
    except UNREADABLE as error:
        raise OrchError(f"`scontrol show nodes --json`: {error}", Exit.CONFIG) from None
    nodes = []
    for node in json_nodes:
        state = node.state if isinstance(node.state, str) else "+".join(node.state)
        features = node.active_features
        nodes.append(
            _node(
                parse_gres(node.gres),
                name=node.name,
                states=parse_state("+".join([state, *node.state_flags])),
                gpus_used=_total(parse_gres(node.gres_used)),
                cpus=node.cpus,
                features=_words(features) if isinstance(features, str) else frozenset(features),
                partitions=frozenset(node.partitions),
                reason=node.reason,
            )
        )
    return nodes


def parse_gres(gres: str) -> dict[str, int]:
    """Parses `gpu:h100:8(S:0-1),gpu:3090:2,nic:2` into {"h100": 8, "3090": 2}; "" is the type of
    GPUs without one.

    A GRES is name[:type][:no_consume][:count][(...)]. The last number is the count, so a type
    may be a number, too.
    """
    counts: dict[str, int] = {}
    for entry in _IN_BRACKETS.sub("", gres).split(","):
        name, *fields = (field for field in entry.strip().split(":") if field != "no_consume")
        if name != "gpu":
            continue
        count = int(fields.pop()) if fields and fields[-1].isdigit() else 1
        kind = ":".join(fields)
        counts[kind] = counts.get(kind, 0) + count
    return counts


def _node(gpus: dict[str, int], **values: Any) -> Node:
    """Returns a node with its whole GPUs separated by type."""
    whole_gpus = [GpuCount(count, kind) for kind, count in gpus.items() if not _SLICE.search(kind)]
    first = whole_gpus[0] if whole_gpus else GpuCount(0, "")
    sliced = len(whole_gpus) < len(gpus)
    return Node(
        gpus=first.gpus,
        gpu_type=first.gpu,
        other_gpus=tuple(whole_gpus[1:]),
        sliced=sliced,
        **values,
    )


def _total(gpus: dict[str, int]) -> int:
    return sum(gpus.values())


def _tres_gpus(tres: str) -> int:
    """Returns the GPUs in use by `AllocTRES`: the total, else the sum over the types, because
    sites track one or the other."""
    match = re.search(r"(?:^|,)gres/gpu=([0-9]+)", tres)
    return (
        int(match[1])
        if match
        else sum(map(int, re.findall(r"(?:^|,)gres/gpu:[^=,]+=([0-9]+)", tres)))
    )


def _number(digits: str | None) -> int:
    return int(digits) if digits and digits.isdigit() else 0


def _words(names: str | None) -> frozenset[str]:
    return frozenset() if names in (None, "", "(null)") else frozenset(names.split(","))
