"""Writes a topology as Slurm's files, a text tree or an SVG picture. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from .hostlist import compress, natural_key, slurm_list
from .model import Tier, Topology, bad

FORMATS = ("conf", "yaml", "block", "orch", "svg", "text")


def switches(topology: Topology) -> list[tuple[str, list[str], tuple[str, ...]]]:
    """Returns (name, child switches, own nodes) of every switch, innermost tier first; names are
    unique over all tiers.

    A switch that is the same on two tiers (levelled short branches) is listed once.
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
    """Returns `topology.conf` of the tree plugin. Reading it gives the same tiers."""
    lines = []
    for name, children, nodes in switches(topology):
        members = f"Switches={slurm_list(children)}" if children else f"Nodes={slurm_list(nodes)}"
        lines.append(f"SwitchName={name} {members}")
    return "\n".join(lines) + "\n" if lines else ""


def slurm_yaml(topology: Topology) -> str:
    """Returns `topology.yaml` (Slurm 25.05 and later) with one tree, or the blocks of a block
    topology."""
    import yaml

    rows = []
    for name, children, nodes in switches(topology):
        key = "children" if children else "nodes"
        rows.append({"switch": name, key: slurm_list(children or nodes)})
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
    """Returns `topology.conf` of the block plugin. Reading it gives the same tiers of a block
    topology.

    Other topologies are cut into blocks: NVLink domains if there are any, else the innermost
    switches. Slurm's base block is the smallest: every block must hold at least as many nodes,
    and its further nodes belong to no block.
    """
    innermost = topology.tiers[0].switches if topology.tiers else {}
    blocks = innermost if topology.kind == "block" else topology.domains or innermost
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
    """Returns the tree in lines, outermost switch first; nodes as host lists."""
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
        hosts = f"  {len(children)} switches"
        if nodes:
            hosts = f"  {len(nodes)} nodes{free}  {compress(nodes)}"
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


_MARGIN = 110  # pixels for the names of tiers
_ROW = 44  # height of a row


def svg(topology: Topology) -> str:
    """Draws a picture: tiers as rows, outermost above, each switch as wide as its nodes; nodes
    out of service are red."""
    order = topology.nodes
    if not order:
        raise bad("topology", "it has no nodes to draw")
    column_of = {node: index for index, node in enumerate(order)}
    cell = max(1.0, min(24.0, 1600 / len(order)))
    width = cell * len(order) + 120
    elements: list[str] = []
    for line, tier in enumerate(reversed(topology.tiers)):
        elements += _draw_tier(tier, 20 + line * _ROW, column_of, cell)
    y = 20 + len(topology.tiers) * _ROW
    elements += _draw_nodes(topology, y, column_of, cell)
    height = y + 40
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}"'
        ' font-family="sans-serif" font-size="12">\n' + "\n".join(elements) + "\n</svg>\n"
    )


def _draw_tier(
    tier: Tier,
    y: int,
    column_of: dict[str, int],
    cell: float,
) -> Iterator[str]:
    """Yields the name of a tier and a box for each of its switches."""
    yield f'<text x="4" y="{y + 17}" font-weight="bold">{escape(tier.name)}</text>'
    for name, nodes in tier.switches.items():
        columns = sorted(column_of[node] for node in nodes)
        x = _MARGIN + columns[0] * cell
        width = (columns[-1] - columns[0] + 1) * cell
        tip = escape(f"{tier.name} {name}: {len(nodes)} nodes, {compress(nodes)}")
        yield (
            f'<rect x="{x + 1:.1f}" y="{y}" width="{max(1.0, width - 2):.1f}" height="26" rx="4"'
            f' fill="#56b4e9"><title>{tip}</title></rect>'
        )
        if width > 8 * len(name):
            yield (
                f'<text x="{x + width / 2:.1f}" y="{y + 17}"'
                f' text-anchor="middle">{escape(name)}</text>'
            )


def _draw_nodes(
    topology: Topology,
    y: int,
    column_of: dict[str, int],
    cell: float,
) -> Iterator[str]:
    """Yields the label of the lowest row and a box for each node."""
    yield f'<text x="4" y="{y + 13}" font-weight="bold">nodes</text>'
    free = set(topology.free)
    for node, column in column_of.items():
        reason = "" if node in free else f": {topology.machines[node].reason}"
        colour = "#009e73" if node in free else "#d55e00"
        x = _MARGIN + column * cell
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{max(0.8, cell - 1):.1f}"'
            f' height="18" fill="{colour}"><title>{escape(node + reason)}</title></rect>'
        )


def export(topology: Topology, format: str) -> str:
    """Returns the text of one of `FORMATS`."""
    from .document import to_document

    makers = {
        "conf": slurm_conf,
        "yaml": slurm_yaml,
        "block": slurm_block,
        "svg": svg,
        "text": text_tree,
    }
    return to_document([topology]) if format == "orch" else makers[format](topology)
