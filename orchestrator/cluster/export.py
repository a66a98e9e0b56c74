"""Topology -> Slurm's files, a text tree and an SVG picture. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from .hostlist import compress, natural_key, slurm_list
from .model import Topology, bad

FORMATS = ("conf", "yaml", "block", "orch", "svg", "text")


def switches(topology: Topology) -> list[tuple[str, list[str], tuple[str, ...]]]:
    """(name, child switches, own nodes) of every switch, innermost tier first; names unique over
    all tiers.

    A switch that is the same on two tiers (levelled short branches) stands there once.
    """
    rows: list[tuple[str, list[str], tuple[str, ...]]] = []
    names: set[str] = set()
    below: dict[str, str] = {}  # node -> unique name of the switch above it so far
    for tier in topology.tiers:
        above: dict[str, str] = {}
        for name, nodes in tier.switches.items():
            children = sorted({below[node] for node in nodes if node in below}, key=natural_key)
            if len(children) == 1 and children[0] == name and below:
                above.update(dict.fromkeys(nodes, name))
                continue
            unique = name
            while unique in names:
                unique = f"{tier.name}.{unique}"
            names.add(unique)
            rows.append((unique, children, () if below else nodes))
            above.update(dict.fromkeys(nodes, unique))
        below = above
    return rows


def slurm_conf(topology: Topology) -> str:
    """`topology.conf` of the tree plugin. Reading it back gives the same tiers."""
    lines = []
    for name, children, nodes in switches(topology):
        members = f"Switches={slurm_list(children)}" if children else f"Nodes={slurm_list(nodes)}"
        lines.append(f"SwitchName={name} {members}")
    return "\n".join(lines) + "\n" if lines else ""


def slurm_yaml(topology: Topology) -> str:
    """`topology.yaml` (Slurm 25.05 and later) with one tree, or the blocks of a block topology."""
    import yaml

    rows = [
        {
            "switch": name,
            **({"children": slurm_list(children)} if children else {"nodes": slurm_list(nodes)}),
        }
        for name, children, nodes in switches(topology)
    ]
    entry = {"topology": topology.name or "default", "cluster_default": True}
    if topology.kind == "block":
        blocks = [
            {"block": name, "nodes": slurm_list(nodes)}
            for name, nodes in topology.tiers[0].switches.items()
        ]
        entry["block"] = {"block_sizes": list(topology.block_sizes), "blocks": blocks}
    else:
        entry |= {"tree": {"switches": rows}} if rows else {"flat": True}
    return yaml.safe_dump([entry], sort_keys=False, width=110)


def slurm_block(topology: Topology) -> str:
    """`topology.conf` of the block plugin. Reading it back gives the same tiers of a block
    topology.

    Others are made into blocks: NVLink domains where there are any, else the innermost switches.
    Slurm's base block is the smallest: every block must hold as many nodes, and more of them count
    as no block.
    """
    tiers = topology.tiers
    blocks = (
        tiers[0].switches
        if topology.kind == "block"
        else topology.domains or (tiers[0].switches if tiers else {})
    )
    if not blocks:
        raise bad("topology", "it has neither NVLink domains nor switches: there are no blocks")
    lines = [f"BlockName={name} Nodes={slurm_list(nodes)}" for name, nodes in blocks.items()]
    sizes = list(topology.block_sizes)
    if not sizes:
        base = min(len(nodes) for nodes in blocks.values())
        sizes = [base]
        while sizes[-1] * 2 <= base * len(blocks):
            sizes.append(sizes[-1] * 2)
    return "\n".join([*lines, f"BlockSizes={','.join(map(str, sizes))}"]) + "\n"


def text_tree(topology: Topology, width: int = 100) -> str:
    """The tree in lines, outermost switch first; nodes as host lists."""
    rows = {name: (children, nodes) for name, children, nodes in switches(topology)}
    inner = {child for children, _ in rows.values() for child in children}
    out_of_service = set(topology.nodes) - set(topology.free)

    def walk(name: str, depth: int) -> Iterator[str]:
        children, nodes = rows[name]
        free = (
            f" ({len(out_of_service & set(nodes))} out of service)"
            if out_of_service & set(nodes)
            else ""
        )
        hosts = (
            f"  {len(nodes)} nodes{free}  {compress(nodes)}"
            if nodes
            else f"  {len(children)} switches"
        )
        yield f"{'  ' * depth}{name}{hosts}"
        for child in children:
            yield from walk(child, depth + 1)

    lines = [line for name in rows if name not in inner for line in walk(name, 0)]
    if topology.domains:
        sizes = sorted({len(nodes) for nodes in topology.domains.values()})
        lines.append(
            f"{len(topology.domains)} NVLink domains of {', '.join(map(str, sizes))} nodes"
        )
    return "\n".join(line if len(line) <= width else line[: width - 3] + "..." for line in lines)


def svg(topology: Topology) -> str:
    """A picture: tiers as rows, outermost above, each switch as wide as its nodes; nodes out of
    service are red."""
    order = topology.nodes
    if not order:
        raise bad("topology", "it has no nodes to draw")
    column_of = {node: index for index, node in enumerate(order)}
    cell = max(1.0, min(24.0, 1600 / len(order)))
    width = cell * len(order) + 120
    row = 44
    elements: list[str] = []
    for line, tier in enumerate(reversed(topology.tiers)):
        y = 20 + line * row
        elements.append(f'<text x="4" y="{y + 17}" font-weight="bold">{escape(tier.name)}</text>')
        for name, nodes in tier.switches.items():
            columns = sorted(column_of[node] for node in nodes)
            x = 110 + columns[0] * cell
            w = (columns[-1] - columns[0] + 1) * cell
            tip = escape(f"{tier.name} {name}: {len(nodes)} nodes, {compress(nodes)}")
            elements.append(
                f'<rect x="{x + 1:.1f}" y="{y}" width="{max(1.0, w - 2):.1f}" height="26" rx="4"'
                f' fill="#56b4e9"><title>{tip}</title></rect>'
            )
            if w > 8 * len(name):
                elements.append(
                    f'<text x="{x + w / 2:.1f}" y="{y + 17}"'
                    f' text-anchor="middle">{escape(name)}</text>'
                )
    y = 20 + len(topology.tiers) * row
    elements.append(f'<text x="4" y="{y + 13}" font-weight="bold">nodes</text>')
    free = set(topology.free)
    for node, column in column_of.items():
        reason = "" if node in free else f": {topology.machines[node].reason}"
        colour = "#009e73" if node in free else "#d55e00"
        elements.append(
            f'<rect x="{110 + column * cell:.1f}" y="{y}" width="{max(0.8, cell - 1):.1f}"'
            f' height="18" fill="{colour}"><title>{escape(node + reason)}</title></rect>'
        )
    height = y + 40
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}"'
        ' font-family="sans-serif" font-size="12">\n' + "\n".join(elements) + "\n</svg>\n"
    )


def export(topology: Topology, format: str) -> str:
    """The text of one of `FORMATS`."""
    from .document import to_document

    makers = {
        "conf": slurm_conf,
        "yaml": slurm_yaml,
        "block": slurm_block,
        "svg": svg,
        "text": text_tree,
    }
    return to_document([topology]) if format == "orch" else makers[format](topology)
