"""Large outputs of Slurm's commands in the form of real ones (22.05.8, `scontrol -o show nodes
-d`)."""

from __future__ import annotations

import json

STATES = (
    *("IDLE",) * 4,
    "ALLOCATED",
    "MIXED+PLANNED",
    "IDLE+DRAIN",
    "DOWN*+DRAIN",
    "IDLE+POWERED_DOWN",
)

_LINE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=56  CPUAlloc=0 CPUEfctv=224 CPUTot=224 CPULoad=0.35"
    " AvailableFeatures=h100,ib ActiveFeatures=h100,ib Gres=gpu:h100:8(S:0-1),nic:8 GresDrain=N/A"
    " GresUsed=gpu:h100:{used}(IDX:N/A),nic:0 NodeAddr={name} NodeHostName={name} Version=22.05.8"
    " OS=Linux 6.1.0-13-amd64 #1 SMP PREEMPT_DYNAMIC Debian 6.1.55-1 (2023-09-29) "
    " RealMemory=2051600 AllocMem=0 FreeMem=2031990 Sockets=2 Boards=1 State={state}"
    " ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=batch,urgent "
    " BootTime=2026-11-21T11:04:36 SlurmdStartTime=2026-11-21T11:30:04"
    " LastBusyTime=2026-11-21T11:30:25 CfgTRES=cpu=224,mem=2051600M,billing=224,gres/gpu=8"
    " AllocTRES={tres} CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s"
    " ExtSensorsWatts=0 ExtSensorsTemp=n/s {reason}"
)


def node_name(index: int) -> str:
    return f"gpu{index:04d}"


def state_of(index: int) -> str:
    return STATES[index * 7 % len(STATES)]


def scontrol_nodes(count: int) -> str:
    lines = []
    for i in range(count):
        state = state_of(i)
        busy = {"ALLOCATED": 8, "MIXED+PLANNED": 3}.get(state, 0)
        reason = (
            "Reason=ECC State=IDLE Gres=gpu:x:9 [root@2026-11-20T10:00:00]"
            if "DRAIN" in state
            else ""
        )
        tres = f"cpu=8,gres/gpu={busy}" if busy else ""
        lines.append(
            _LINE.format(name=node_name(i), state=state, used=busy, tres=tres, reason=reason)
        )
    return "\n".join(lines) + "\n"


def scontrol_nodes_json(count: int) -> str:
    """The form of 23.11 and later."""
    nodes = []
    for i in range(count):
        state = state_of(i)
        busy = {"ALLOCATED": 8, "MIXED+PLANNED": 3}.get(state, 0)
        node = {"name": node_name(i), "state": state.replace("*", "+NOT_RESPONDING").split("+")}
        node |= {"gres": "gpu:h100:8(S:0-1),nic:8", "gres_used": f"gpu:h100:{busy}(IDX:N/A),nic:0"}
        node |= {"cpus": 224, "real_memory": 2051600, "active_features": ["h100", "ib"]}
        nodes.append(
            node | {"partitions": ["batch", "urgent"], "reason": "", "unknown_key": {"a": [1]}}
        )
    return json.dumps({"meta": {}, "nodes": nodes, "errors": []})


def scontrol_topology(count: int, leaf: int = 32, spines: int = 8) -> str:
    """A three-tier tree: leaves of `leaf` nodes, `spines` leaves a spine, one core."""
    leaves = [list(range(i, min(i + leaf, count))) for i in range(0, count, leaf)]
    lines = [
        f"SwitchName=leaf{i} Level=0 LinkSpeed=1 Nodes=gpu[{n[0]:04d}-{n[-1]:04d}]"
        for i, n in enumerate(leaves)
    ]
    groups = [list(range(i, min(i + spines, len(leaves)))) for i in range(0, len(leaves), spines)]
    for i, group in enumerate(groups):
        first = leaves[group[0]][0]
        last = leaves[group[-1]][-1]
        children = f"leaf[{group[0]}-{group[-1]}]"
        lines.append(
            f"SwitchName=spine{i} Level=1 LinkSpeed=1 Nodes=gpu[{first:04d}-{last:04d}]"
            f" Switches={children}"
        )
    lines.append(
        f"SwitchName=core Level=2 LinkSpeed=1 Nodes=gpu[0000-{count - 1:04d}]"
        f" Switches=spine[0-{len(groups) - 1}]"
    )
    return "\n".join(lines) + "\n"
