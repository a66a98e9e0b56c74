"""Builds clusters from a table's names of GPUs and networks. What a name does not state is assumed,
and reported as assumed."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import msgspec
from msgspec import UNSET, Struct

from orchestrator.cluster.gpu_models import gpu_model
from orchestrator.plan.document import Cluster, Gpu, Link, SwitchLevel

from .data_files import records

GIB = 1 << 30


class GpuData(Struct, frozen=True):
    """Data-sheet values of a GPU, from `gpus.csv`; rates are without sparsity."""

    memory_gib: float
    half_tflops: float  # TFLOP/s in bf16 and fp16.
    fp8_tflops: float
    hbm_gb_per_s: float
    #: One-way rate from one GPU to the others of its node, by NVLink, Infinity Fabric or PCIe.
    link_gb_per_s: float
    nic_gbit: float  # Gb/s per GPU of the reference system.
    per_node: int = 8
    fp4_tflops: float = 0.0


#: Name of a GPU -> values of its data sheet. The memory is what the driver shows. A GPU without
#: 8-bit products has its 16-bit rate there.
GPUS: dict[str, GpuData] = {
    cells["name"]: msgspec.convert(cells, GpuData, strict=False) for cells in records("gpus.csv")
}
#: GPUs whose nodes of four have no NVSwitch: a third of a GPU's links goes to each of the others
#: (HGX A100 and H100 with four GPUs; the quad GH200 of Alps and JUPITER, arXiv 2408.11556, section
#: II).
_DIRECT = (
    "V100-16GB",
    "V100-32GB",
    "A100-40GB",
    "A100-64GB",
    "A100-80GB",
    "H100-80GB",
    "H200",
    "GH200",
)
SOURCE = "data sheets"
#: Matches what may precede a GPU's name without a space.
_BEFORE = (
    r"(?:\d+X|NVIDIA|TESLA|AMD|INSTINCT|GEFORCE|QUADRO|RTX|DGX|HGX|INTEL|ASCEND|GOOGLE|CLOUD|TPU"
    r"|MI)"
)
#: (pattern of a name in upper case, with single spaces between words, the GPU that it means). The
#: first match counts: names of GPUs, then of systems and of clouds' machines, then of generations.
_NAMES: tuple[tuple[str, str], ...] = (
    *(
        (name, name)
        for name in ("GB300", "GB200", "B300", "B200", "GH200", "H200", "H800", "A10G", "L40S")
    ),
    ("H100.*(HBM2E|500 ?W)", "H100-96GB-HBM2e"),
    ("H100.*(PCIE|PCI E)", "H100-PCIe"),
    ("H100.*(NVL(?!INK)|94)", "H100-NVL"),
    ("H100", "H100-80GB"),
    ("H20", "H20"),
    ("A800", "A800-80GB"),
    ("A100.*80.*PCIE|A100.*PCIE.*80", "A100-80GB-PCIe"),
    ("A100.*PCIE", "A100-40GB-PCIe"),
    ("A100.*64", "A100-64GB"),
    ("A100.*40(?!0)", "A100-40GB"),
    ("A100", "A100-80GB"),
    ("P100", "P100"),
    ("V100.*16 ?G", "V100-16GB"),
    ("V100", "V100-32GB"),
    ("T4", "T4"),
    ("A6000", "A6000"),
    ("6000 ?ADA|ADA ?6000", "RTX6000-Ada"),
    ("3090", "RTX3090"),
    ("4090", "RTX4090"),
    ("5090", "RTX5090"),
    ("A40", "A40"),
    ("A30", "A30"),
    ("A10", "A10"),
    ("L40", "L40"),
    ("L4", "L4"),
    ("MI210", "MI210"),
    ("MI250", "MI250X"),
    ("MI300", "MI300X"),
    ("MI325", "MI325X"),
    (r"MI35\d", "MI355X"),
    ("GAUDI ?3", "Gaudi3"),
    ("GAUDI ?2|HPU", "Gaudi2"),
    (r"910 ?B\d?", "Ascend910B"),
    ("TPU ?V3", "TPUv3"),
    ("TPU ?V4", "TPUv4"),
    ("TPU ?V5 ?P", "TPUv5p"),
    ("TPU ?V5", "TPUv5e"),
    ("TPU ?V6|TRILLIUM", "TPUv6e"),
    ("DGX 1", "V100-16GB"),
    ("DGX 2", "V100-32GB"),
    (r"P4DE|ND\d+AMSR|A2 ULTRA", "A100-80GB"),
    (r"P4D|ND\d+ASR|A2 HIGH", "A100-40GB"),
    ("P3DN", "V100-32GB"),
    (r"P3\b", "V100-16GB"),
    ("P5E|A3 ULTRA", "H200"),
    ("P5|A3 (HIGH|MEGA|EDGE)", "H100-80GB"),
    ("P6", "B200"),
    ("G5", "A10G"),
    ("G6E", "L40S"),
    ("G6", "L4"),
    ("VOLTA", "V100-32GB"),
    ("AMPERE", "A100-80GB"),
    ("HOPPER", "H100-80GB"),
    ("BLACKWELL", "B200"),
)


@lru_cache(maxsize=1024)
def gpu_of(name: str) -> tuple[str, bool]:
    """Returns (the GPU that `name` means, True), or an H100 and False if the name is not known.

    Workstation GPUs whose names contain the number of another GPU or the name of their generation
    (Quadro RTX, RTX PRO) are not known.
    """
    if gpu_model(name).startswith(("quadro", "pro")):
        return "H100-80GB", False
    upper_name = re.sub(r"[\s_\-/,]+", " ", name[:80].upper())
    for pattern, gpu in _NAMES:
        if re.search(rf"(?<![A-Z0-9]){_BEFORE}*(?:{pattern})(?!\d)", upper_name):
            return gpu, True
    return "H100-80GB", False


class Network(NamedTuple):
    """The network that an interconnect's words describe."""

    gbit_per_gpu: float | None  # None if no rate is stated.
    nics_per_node: int | None
    nvlink: bool | None  # None if it is not stated; False for "PCIe" and "no NVLink".
    domain_gpus: int | None  # GPUs of one NVLink domain that spans nodes.
    per_node: int | None  # GPUs per node, from "DGX-2" or "(8 GPU)".
    slow: bool  # True for a cloud's network or Ethernet.


_SEVERAL = re.compile(r"(\d+)\s*[x×]\s*(\d+(?:\.\d+)?)\s*(g|t)(?:b/?e?|bps|bit|ig)", re.I)
_ONE = re.compile(
    r"(\d+(?:\.\d+)?)\s*(g|t)(bps|b/s|bit/s|igabit|bit|be|ige|b)\b[^,;+]*?"
    r"(?:(?:per|a|/)\s*(gpu|nic|node|host|server|port)|$|[+,;(])",
    re.I,
)
_NICS = re.compile(r"(\d+)\s*(?:x\s*)?(?:nics?|hcas?|ports?|rails?)", re.I)
_CLASSES = re.compile(
    r"(\d+)\s*[x×]\s*(?:ib\s*|infiniband\s*|mellanox\s*)?(?:[ehnxf]dr|connectx|cx-?\d)", re.I
)
#: Matches networks whose rate is that of the node if it is stated without "per".
_WHOLE_NODE = re.compile(r"ethernet|\d\s*g(?:b?e|ige)\b|efa|tcp|gigabit", re.I)
#: Name of a class of networks -> Gb/s of one NIC. The first name that occurs counts.
_CLASS = {
    "edr": 100,
    "hdr100": 100,
    "hdr": 200,
    "ndr200": 200,
    "ndr": 400,
    "xdr": 800,
    "fdr": 56,
    "slingshot-10": 100,
    "slingshot": 200,
    "omni": 100,
}
_SLOW = re.compile(
    r"\befa\b|roce|ethernet|gigabit|\d\s*g(?:b?e|ige)\b|tcp|cloud|not"
    r" stated|unknown|\baws\b|\bgcp\b|azure|\boci\b",
    re.I,
)
_FAST = re.compile(r"infiniband|\bib\b|[ehnx]dr\b|omni|slingshot|quantum|nvl ?\d{2}|dgx", re.I)


@lru_cache(maxsize=1024)
def network_of(interconnect: str, gpus_per_node: int) -> Network:
    """Reads the words of `interconnect` for a system whose nodes have `gpus_per_node` GPUs."""
    description = interconnect[:200].lower()
    domain = re.search(r"nvl ?(\d{2,3})\b", description)
    domain_gpus = int(domain[1]) if domain else None
    per_node = _stated_node_size(description)
    gbit, nics = _rate(description, _stated_nics(description), per_node or gpus_per_node)
    is_low_rate = gbit is not None and gbit < 100 and not _FAST.search(description)
    return Network(
        gbit_per_gpu=gbit,
        nics_per_node=nics,
        nvlink=_stated_nvlink(description, domain_gpus),
        domain_gpus=domain_gpus,
        per_node=per_node,
        slow=bool(_SLOW.search(description)) or is_low_rate,
    )


def _stated_node_size(description: str) -> int | None:
    """Returns the GPUs of a node, or None if the description does not state them."""
    if match := re.search(r"\((\d+) ?gpus?\)", description):
        return int(match[1])
    return 16 if "dgx-2" in description else None


def _stated_nics(description: str) -> int | None:
    match = _NICS.search(description) or _CLASSES.search(description)
    return int(match[1]) if match else None


def _rate(
    description: str,
    stated_nics: int | None,
    node_gpus: int,
) -> tuple[float | None, int | None]:
    """Returns (Gb/s per GPU, NICs per node), each None if it is not stated. The NICs of a product
    such as "8x 400 Gb/s" count before `stated_nics`."""
    # The rate of NVLink follows from its generation, not from these words.
    external = re.sub(r"(?:nv(?:link|switch)|pcie)[^+,;/]*", "", description)
    if product := _SEVERAL.search(external):
        nics = int(product[1])
        return nics * _gbit(product[2], product[3]) / node_gpus, nics
    if bare_product := re.search(r"(\d+)\s*[x×]\s*(25|40|50|56|100|200|400|800)\b", external):
        nics = int(bare_product[1])
        return nics * float(bare_product[2]) / node_gpus, nics
    if rate := _ONE.search(external):
        is_whole_node = bool(_WHOLE_NODE.search(description))
        return _single_rate(rate, stated_nics, node_gpus, is_whole_node), stated_nics
    return _class_rate(external, stated_nics, node_gpus), stated_nics


def _single_rate(
    match: re.Match[str],
    nics: int | None,
    node_gpus: int,
    is_whole_node: bool,
) -> float:
    """Returns the Gb/s per GPU of a match of `_ONE`. `is_whole_node` says that a rate without "per"
    is that of the node."""
    gbit = _gbit(match[1], match[2])
    unit = match[4] or ""
    if unit in ("nic", "port", "") and nics:
        return gbit * nics / node_gpus
    if unit in ("node", "host", "server"):
        return gbit / node_gpus
    if not unit and (gbit > 800 or is_whole_node):
        return gbit / node_gpus
    return gbit


def _class_rate(external: str, nics: int | None, node_gpus: int) -> float | None:
    """Returns the Gb/s per GPU of a network that is named by its class, such as HDR; None without
    such a name."""
    gbit = next((rate for class_name, rate in _CLASS.items() if class_name in external), None)
    if not gbit:
        return None
    if nics:
        return gbit * nics / node_gpus
    if "omni" in external:
        return gbit / node_gpus
    return float(gbit)


def _stated_nvlink(description: str, domain_gpus: int | None) -> bool | None:
    is_without = re.search(r"no nv ?link|without nv ?link|\bpci-?e\d?\b", description)
    if is_without and not re.search(r"(?<!no )nvlink\d|nvswitch", description):
        return False
    if "nvlink" in description or "nvswitch" in description or domain_gpus is not None:
        return True
    return None


def _gbit(number: str, letter: str) -> float:
    return float(number) * (1000 if letter.lower() == "t" else 1)


@lru_cache(maxsize=512)
def cluster_of(
    gpu: str,
    num_gpus: int,
    gpus_per_node: int,
    network: Network,
) -> Cluster:
    """Returns a cluster with one switch level over all nodes, because tables do not describe
    switches.

    If the row does not describe its network, the cluster has that of the GPU's reference system.
    `gpus_per_node` counts the GPUs of a whole node, of which a small job takes only some.
    """
    sheet = GPUS[gpu]
    used_gpus_per_node = min(gpus_per_node, num_gpus)
    nodes = -(-num_gpus // used_gpus_per_node)
    is_direct = (
        gpu in _DIRECT
        and gpus_per_node == 4
        and network.nvlink is not False
        and not network.domain_gpus
    )
    link_bytes_per_s = _link_bytes_per_s(sheet, network)
    if is_direct:  # Only the links between the job's own GPUs count.
        link_bytes_per_s *= max(1, used_gpus_per_node - 1) / (gpus_per_node - 1)
    domain_gpus = network.domain_gpus or used_gpus_per_node
    nics = network.nics_per_node or used_gpus_per_node
    return Cluster(
        name=f"{gpu}x{num_gpus}",
        device="cuda",
        node_names=[str(index) for index in range(nodes)],
        gpus_per_node=used_gpus_per_node,
        gpu=Gpu(
            name=gpu,
            memory_bytes=int(sheet.memory_gib * GIB),
            peak_flops=_peak_flops(sheet),
            hbm_bytes_per_s=sheet.hbm_gb_per_s * 1e9,
            source=SOURCE,
        ),
        nvlink_domains=_nvlink_domains(nodes, max(1, domain_gpus // used_gpus_per_node)),
        nvlink=Link(
            bytes_per_s=link_bytes_per_s,
            latency_s=3.4e-6,
            source=SOURCE,
        ),
        nics_per_node=nics,
        rails=nics,
        levels=[
            SwitchLevel(
                name="fabric",
                switches=[list(range(nodes))],
                bytes_per_s=(network.gbit_per_gpu or sheet.nic_gbit) * 1e9 / 8,
                latency_s=1e-5,
                oversubscription=1.0,
                source=SOURCE,
            )
        ],
        direct_nvlink=True if is_direct else UNSET,
    )


def _link_bytes_per_s(sheet: GpuData, network: Network) -> float:
    """Returns the rate of a node's links: that of the data sheet, or at most that of PCIe in nodes
    without NVLink."""
    gb_per_s = sheet.link_gb_per_s
    if network.nvlink is False:
        pcie_gb_per_s = 64.0 if sheet.half_tflops > 700 else 32.0
        gb_per_s = min(gb_per_s, pcie_gb_per_s)
    return gb_per_s * 1e9


def _peak_flops(sheet: GpuData) -> dict[str, float]:
    half_flops = sheet.half_tflops * 1e12
    return {
        "fp32": half_flops / 8,
        "bf16": half_flops,
        "fp16": half_flops,
        "fp8": sheet.fp8_tflops * 1e12,
        "nvfp4": max(sheet.fp4_tflops, sheet.fp8_tflops) * 1e12,
    }


def _nvlink_domains(nodes: int, most_nodes: int) -> list[list[int]]:
    """Returns the nodes of each NVLink domain, of at most `most_nodes` nodes.

    A job that does not fill whole domains takes an equal part of each: 512 GPUs are 64 GPUs in each
    of eight NVL72 racks.
    """
    sizes = range(most_nodes, most_nodes // 2, -1)
    size = next((size for size in sizes if nodes % size == 0), most_nodes)
    return [
        list(range(first_node, min(first_node + size, nodes)))
        for first_node in range(0, nodes, size)
    ]
