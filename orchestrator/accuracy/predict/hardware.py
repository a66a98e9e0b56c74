"""Builds clusters from a table's names of GPUs and networks. What a name does not state is assumed,
and reported as assumed."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from msgspec import UNSET

from orchestrator.cluster.gpu_models import gpu_model
from orchestrator.plan.document import Cluster, Gpu, Link, SwitchLevel

GIB = 1 << 30


class GpuData(NamedTuple):
    """Data-sheet values of a GPU; rates are without sparsity."""

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
    "P100": GpuData(16, 21.2, 21.2, 732, 80, 12.5),
    "V100-16GB": GpuData(16, 125, 125, 900, 150, 25),
    "V100-32GB": GpuData(32, 125, 125, 900, 150, 50),
    "A100-40GB": GpuData(40, 312, 312, 1555, 300, 200),
    "A100-40GB-PCIe": GpuData(40, 312, 312, 1555, 32, 100),
    "A100-64GB": GpuData(64, 312, 312, 1640, 300, 100, 4),  # The GPU of Leonardo.
    "A100-80GB": GpuData(80, 312, 312, 2039, 300, 200),
    "A100-80GB-PCIe": GpuData(80, 312, 312, 1935, 32, 100),
    "A800-80GB": GpuData(80, 312, 312, 2039, 200, 200),  # Its NVLink has 400 GB/s.
    "A40": GpuData(45, 150, 150, 696, 32, 50),
    "A30": GpuData(24, 165, 165, 933, 32, 50),
    "A10G": GpuData(22.5, 70, 70, 600, 32, 12.5),
    "A10": GpuData(22.5, 125, 125, 600, 32, 25),
    "A6000": GpuData(47.5, 155, 155, 768, 32, 25),
    "T4": GpuData(15, 65, 65, 320, 16, 12.5),
    "RTX3090": GpuData(24, 71, 71, 936, 32, 12.5),
    "RTX4090": GpuData(24, 165, 330, 1008, 32, 12.5),
    "RTX5090": GpuData(32, 210, 419, 1792, 64, 12.5),
    "RTX6000-Ada": GpuData(47.5, 182, 364, 960, 32, 25),
    "L4": GpuData(22.5, 121, 242, 300, 32, 12.5),
    "L40S": GpuData(45, 362, 733, 864, 32, 50),
    "L40": GpuData(45, 181, 362, 864, 32, 50),
    "H20": GpuData(95.6, 148, 296, 4000, 450, 400),
    "H800": GpuData(79.6, 989, 1979, 3350, 200, 400),  # Its NVLink has 400 GB/s.
    "H100-80GB": GpuData(79.6, 989, 1979, 3350, 450, 400),
    # At 500 W its clock is 0.87 of that at 700 W.
    "H100-96GB-HBM2e": GpuData(95, 860, 1721, 2400, 450, 400),
    "H100-PCIe": GpuData(79.6, 756, 1513, 2000, 64, 100),
    "H100-NVL": GpuData(93.6, 835, 1671, 3900, 300, 200),
    "GH200": GpuData(95.6, 989, 1979, 4000, 450, 200, 4),
    "H200": GpuData(140.4, 989, 1979, 4800, 450, 400),
    "B200": GpuData(179, 2250, 4500, 8000, 900, 400, 8, 9000),
    "GB200": GpuData(185, 2500, 5000, 8000, 900, 400, 4, 10000),
    "B300": GpuData(268, 2250, 4500, 8000, 900, 800, 8, 13500),
    "GB300": GpuData(277, 2500, 5000, 8000, 900, 800, 4, 15000),
    "MI210": GpuData(64, 181, 181, 1638, 100, 100),
    # The values are those of one of its two dies, each of which is a device.
    "MI250X": GpuData(64, 191.5, 191.5, 1638, 100, 100),
    "MI300X": GpuData(192, 1307, 2615, 5300, 448, 400),
    "MI325X": GpuData(256, 1307, 2615, 6000, 448, 400),
    "MI355X": GpuData(288, 2516, 5033, 8000, 538, 400, 8, 10066),
    "Gaudi2": GpuData(96, 432, 865, 2450, 262, 300),
    "Gaudi3": GpuData(128, 1835, 1835, 3700, 525, 600),
    "Ascend910B": GpuData(64, 376, 376, 1600, 196, 200),
    # The links of TPUs are those of the torus, all in one domain.
    "TPUv3": GpuData(32, 123, 123, 900, 164, 164, 4),
    "TPUv4": GpuData(32, 275, 275, 1228, 150, 150, 4),
    "TPUv5e": GpuData(16, 197, 197, 819, 100, 100, 4),
    "TPUv5p": GpuData(95, 459, 459, 2765, 300, 300, 4),
    "TPUv6e": GpuData(32, 918, 918, 1640, 224, 224, 4),
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
_CLASS = {
    "edr": 100,
    "hdr100": 100,
    "hdr": 200,
    "ndr200": 200,
    "ndr": 400,
    "xdr": 800,
    "fdr": 56,
    "slingshot-10": 100,
}
_CLASS |= {"slingshot": 200, "omni": 100}
_SLOW = re.compile(
    r"\befa\b|roce|ethernet|gigabit|\d\s*g(?:b?e|ige)\b|tcp|cloud|not"
    r" stated|unknown|\baws\b|\bgcp\b|azure|\boci\b",
    re.I,
)
_FAST = re.compile(r"infiniband|\bib\b|[ehnx]dr\b|omni|slingshot|quantum|nvl ?\d{2}|dgx", re.I)


@lru_cache(maxsize=1024)
def network_of(interconnect: str, gpus_per_node: int) -> Network:
    """Reads the words of `interconnect` for a system whose nodes have `gpus_per_node` GPUs."""
    shortened = interconnect[:200]
    lower = shortened.lower()
    domain = re.search(r"nvl ?(\d{2,3})\b", lower)
    node = re.search(r"\((\d+) ?gpus?\)", lower)
    per_node = int(node[1]) if node else 16 if "dgx-2" in lower else None
    size = per_node or gpus_per_node
    nics = int(_NICS.search(lower)[1]) if _NICS.search(lower) else None  # type: ignore[index]
    by_class = _CLASSES.search(lower)
    if by_class and nics is None:
        nics = int(by_class[1])
    # The rate of NVLink follows from its generation, not from these words.
    external = re.sub(r"(?:nv(?:link|switch)|pcie)[^+,;/]*", "", lower)
    gbit = None
    if product_match := _SEVERAL.search(external):
        nics = int(product_match[1])
        gbit = nics * _gbit(product_match[2], product_match[3]) / size
    elif bare_match := re.search(r"(\d+)\s*[x×]\s*(25|40|50|56|100|200|400|800)\b", external):
        nics = int(bare_match[1])
        gbit = nics * float(bare_match[2]) / size
    elif rate_match := _ONE.search(external):
        rate = _gbit(rate_match[1], rate_match[2])
        unit = rate_match[4] or ""
        if unit in ("nic", "port", "") and nics:
            gbit = rate * nics / size
        elif unit in ("node", "host", "server") or (
            not unit and (rate > 800 or _WHOLE_NODE.search(lower))
        ):
            gbit = rate / size
        else:
            gbit = rate
    else:
        class_gbit = next(
            (rate for class_name, rate in _CLASS.items() if class_name in external), None
        )
        if class_gbit and nics:
            gbit = class_gbit * nics / size
        elif class_gbit and "omni" in external:
            gbit = class_gbit / size
        elif class_gbit:
            gbit = float(class_gbit)
    linked = None
    if re.search(r"no nv ?link|without nv ?link|\bpci-?e\d?\b", lower) and not re.search(
        r"(?<!no )nvlink\d|nvswitch", lower
    ):
        linked = False
    elif "nvlink" in lower or "nvswitch" in lower or domain:
        linked = True
    slow = bool(_SLOW.search(lower)) or (
        gbit is not None and gbit < 100 and not _FAST.search(lower)
    )
    return Network(gbit, nics, linked, int(domain[1]) if domain else None, per_node, slow)


def _gbit(number: str, letter: str) -> float:
    return float(number) * (1000 if letter.lower() == "t" else 1)


@lru_cache(maxsize=512)
def cluster_of(gpu: str, num_gpus: int, gpus_per_node: int, network: Network) -> Cluster:
    """Returns a cluster with one switch level over all nodes, because tables do not describe
    switches.

    If the row does not describe its network, the cluster has that of the GPU's reference system.
    `gpus_per_node` counts the GPUs of a whole node, of which a small job takes only some.
    """
    sheet = GPUS[gpu]
    node_gpus = gpus_per_node
    gpus_per_node = min(node_gpus, num_gpus)
    is_direct = (
        gpu in _DIRECT
        and node_gpus == 4
        and network.nvlink is not False
        and not network.domain_gpus
    )
    nodes = -(-num_gpus // gpus_per_node)
    domain_limit = max(1, (network.domain_gpus or gpus_per_node) // gpus_per_node)
    # A job that does not fill whole domains takes an equal part of each: 512 GPUs are 64 GPUs in
    # each of eight NVL72 racks.
    nodes_per_domain = next(
        (
            nodes_of_part
            for nodes_of_part in range(domain_limit, domain_limit // 2, -1)
            if nodes % nodes_of_part == 0
        ),
        domain_limit,
    )
    half_flops = sheet.half_tflops * 1e12
    peak_flops = {
        "fp32": half_flops / 8,
        "bf16": half_flops,
        "fp16": half_flops,
        "fp8": sheet.fp8_tflops * 1e12,
    }
    peak_flops["nvfp4"] = max(sheet.fp4_tflops, sheet.fp8_tflops) * 1e12
    pcie_gb_per_s = (
        min(sheet.link_gb_per_s, 64.0 if GPUS[gpu].half_tflops > 700 else 32.0)
        if network.nvlink is False
        else 0.0
    )
    link_bytes_per_s = (pcie_gb_per_s or sheet.link_gb_per_s) * 1e9
    if is_direct:  # Only the links between the job's own GPUs count.
        link_bytes_per_s *= max(1, gpus_per_node - 1) / (node_gpus - 1)
    nics = network.nics_per_node or gpus_per_node
    return Cluster(
        name=f"{gpu}x{num_gpus}",
        device="cuda",
        node_names=[str(index) for index in range(nodes)],
        gpus_per_node=gpus_per_node,
        gpu=Gpu(
            name=gpu,
            memory_bytes=int(sheet.memory_gib * GIB),
            peak_flops=peak_flops,
            hbm_bytes_per_s=sheet.hbm_gb_per_s * 1e9,
            source=SOURCE,
        ),
        nvlink_domains=[
            list(range(first_node, min(first_node + nodes_per_domain, nodes)))
            for first_node in range(0, nodes, nodes_per_domain)
        ],
        nvlink=Link(bytes_per_s=link_bytes_per_s, latency_s=3.4e-6, source=SOURCE),
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
