"""Inputs in the form of the real tools' outputs.

ibnetdiscover's lines follow infiniband-diags' own (tabs, GUIDs in brackets, `4xNDR`), for fabrics
generated here.
"""

from __future__ import annotations

import json


def ibnetdiscover(
    pods: int, nodes: list[int], rails: int = 2, spines: int = 2, cores: int = 2
) -> str:
    """`pods` pods; pod p has groups of `nodes` nodes, each group with one leaf a rail; cores only
    between pods."""
    links: dict[str, list[tuple[str, str]]] = {}
    desc: dict[str, str] = {}

    def switch(kind: int, *index: int) -> str:
        guid = f"S-{kind:04x}" + "".join(f"{i:04x}" for i in (*index, 0, 0, 0)[:3])
        desc.setdefault(
            guid, f"MF0;{('leaf', 'spine', 'core')[kind]}-{'-'.join(map(str, index))}:MQM9700/U1"
        )
        return guid

    def link(a: str, b: str) -> None:
        links.setdefault(a, []).append((b, "4xNDR"))
        links.setdefault(b, []).append((a, "4xNDR"))

    number = 0
    for pod in range(pods):
        for group, size in enumerate(nodes):
            for _ in range(size):
                for rail in range(rails):
                    adapter = f"H-{number:012x}{rail:04x}"
                    desc[adapter] = f"node{number} mlx5_{rail}"
                    link(adapter, switch(0, pod, group, rail))
                number += 1
            for rail in range(rails):
                for spine in range(spines):
                    link(switch(0, pod, group, rail), switch(1, pod, spine))
        if pods > 1:
            for spine in range(spines):
                for core in range(cores):
                    link(switch(1, pod, spine), switch(2, core))
    lines = ["#", "# Topology file: generated on Sat Nov 21 09:00:00 2026", "#", ""]
    for name in sorted(desc, reverse=True):
        kind = "Switch\t65" if name[0] == "S" else "Ca\t1"
        tail = " enhanced port 0 lid 1 lmc 0" if name[0] == "S" else ""
        lines += ["vendid=0x2c9", "devid=0xd2f2", f'{kind} "{name}"\t\t# "{desc[name]}"{tail}']
        for port, (peer, rate) in enumerate(links[name], 1):
            guid = f"({peer[2:]})" if peer[0] == "H" else ""
            lines.append(f'[{port}]\t"{peer}"[1]{guid} \t\t# "{desc[peer]}" lid {port} {rate}')
        lines.append("")
    return "\n".join(lines)


def kubernetes(labels: dict[str, dict[str, str]], **extra: dict) -> str:
    """`kubectl get nodes -o json`: labels of each node; `extra`: node name (with - as _) -> further
    fields."""
    items = []
    for name, node_labels in labels.items():
        status = {"allocatable": {"nvidia.com/gpu": "8", "rdma/ib": "8", "cpu": "128"},
                  "conditions": [{"type": "Ready", "status": "True"}]}  # fmt: skip
        item = {
            "kind": "Node",
            "metadata": {"name": name, "labels": node_labels, "uid": "x"},
            "spec": {},
            "status": status,
        }
        for key, value in extra.get(name.replace("-", "_"), {}).items():
            item[key] = {**item[key], **value}
        items.append(item)
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
