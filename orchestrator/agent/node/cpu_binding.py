"""Binds each worker to the cores of its GPU's NUMA domain, so that copies to the GPU cross no
socket.

This is what torchrun's `--numa-binding=node` does, without numactl and without starting CUDA.
Workers of one domain share its cores: a split would leave the cores of a waiting worker idle while
the data loader of another one has too few. Memory follows by first touch, since the pages of a
bound worker are allocated where it runs; there is no strict memory policy, which would end a worker
whose domain is full. Processes that a worker starts (data loaders) inherit its cores.

The mapping of GPUs to workers is read from the driver's and the kernel's files, which costs nothing
and never hangs. A worker stays unbound where these leave a doubt. `root` is the folder that
contains /proc, /sys and /dev.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
#: With these variables a program binds its threads itself, unless their value is in _NO_BINDING.
_OWN_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")
_NO_BINDING = ("", "false", "none", "disabled")
_MIN_SHARE = 0.25  # of the cores that a worker would have without a binding


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU of this machine."""

    address: tuple[int, ...]  # PCI domain, bus, device and function, as in 0000:19:00.0
    uuid: str
    model: str

    @property
    def name(self) -> str:
        """The name of its folder in /sys/bus/pci/devices."""
        domain, bus, device, function = self.address
        return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


@dataclass(frozen=True)
class Binding:
    """The cores of each worker by local rank, empty for an unbound worker.

    `reason` tells why workers with GPUs stay unbound, "" if there is nothing to report.
    """

    cores: list[Set[int]]
    reason: str = ""


def bind(
    root: Path,
    environ: Mapping[str, str],
    allowed: Set[int],
    workers: int,
    one_gpu_each: bool,
) -> Binding:
    """Returns the cores of each worker of this node.

    `environ`: the workers' environment; `allowed`: the cores that this process may use;
    `one_gpu_each`: worker i computes on the i-th GPU that it sees, even if it sees more.
    """
    unbound = Binding([set()] * workers)
    domains = _cores_of_domains(root)
    if sum(map(bool, domains.values())) < 2:
        return unbound
    visible_gpus = _visible_gpus(_gpus(root), environ)
    is_one_per_worker = len(visible_gpus) == workers
    is_enough = one_gpu_each and len(visible_gpus) > workers
    if not visible_gpus or not (is_one_per_worker or is_enough):
        return unbound
    for name in _OWN_BINDING:
        if environ.get(name, "").lower() not in _NO_BINDING:
            return Binding(unbound.cores, f"{name} is set")
    candidates = visible_gpus[:workers]
    worker_domains = [_domain_of(root, gpus, domains) for gpus in candidates]
    cores = list(unbound.cores)
    reason = ""
    for domain in sorted({domain for domain in worker_domains if domain is not None}):
        local_ranks = [rank for rank in range(workers) if worker_domains[rank] == domain]
        count = len(local_ranks)
        domain_cores = domains[domain] & allowed
        fair_share = len(allowed) * count / workers
        if len(domain_cores) < max(count, _MIN_SHARE * fair_share):
            reason = (
                f"{count} of {workers} workers have a GPU of NUMA domain {domain}, where this job"
                f" may use {len(domain_cores)} of its {len(allowed)} cores"
            )
            continue
        for local_rank in local_ranks:
            cores[local_rank] = domain_cores
    return Binding(cores, reason)


def device_visibility(environ: Mapping[str, str], gpus: Sequence[int]) -> dict[str, str]:
    """Returns the variable by which workers see only these GPUs, numbered among those they see now.

    Returns nothing if the GPUs are the first ones, or if `environ` does not show all of them.
    """
    if list(gpus) == list(range(len(gpus))):
        return {}
    names = [str(gpu) for gpu in range(max(gpus) + 1)]
    if VISIBLE in environ:
        names = environ[VISIBLE].split(",")
    if max(gpus) >= len(names):
        return {}
    return {VISIBLE: ",".join(names[gpu].strip() for gpu in gpus)}


def format_cpu_list(cores: Set[int]) -> str:
    """Formats cores as the kernel does: `0-15,32-47`."""
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and core == spans[-1][-1] + 1:
            spans[-1][-1] = core
        else:
            spans.append([core, core])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


# ------------------------------------------------------------------------------------------ GPUs


def _gpus(root: Path) -> list[Gpu]:
    """Returns the NVIDIA GPUs that this process may open, in CUDA's order for GPUs of one model."""
    gpus: list[Gpu] = []
    for folder in root.glob("proc/driver/nvidia/gpus/*"):
        with contextlib.suppress(OSError, ValueError):  # a GPU may have fallen off the bus
            gpu = _read_gpu(root, folder)
            if gpu is not None:
                gpus.append(gpu)
    return sorted(gpus, key=lambda gpu: gpu.address)


def _read_gpu(root: Path, folder: Path) -> Gpu | None:
    """Reads a GPU's folder in /proc; returns None if this process may not use the GPU."""
    lines = (folder / "information").read_text().splitlines()
    pairs = [line.partition(":") for line in lines]
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    numbers = folder.name.replace(".", ":").split(":")
    address = tuple(int(number, 16) for number in numbers)
    if len(address) != 4 or facts.get("GPU Excluded") == "Yes":
        return None
    device = root / "dev" / f"nvidia{facts.get('Device Minor', '')}"
    if not os.access(device, os.R_OK | os.W_OK):  # Slurm's devices cgroup keeps the file
        return None
    return Gpu(address, facts.get("GPU UUID", ""), facts.get("Model", ""))


def _visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Sequence[Gpu]]:
    """Returns, for each GPU that a program sees, the GPUs that it may be.

    That is one GPU where the number or the name tells. As in CUDA, the list ends at the first
    identifier that is not valid.
    """
    is_same_model = len({gpu.model for gpu in gpus}) == 1
    numbered = is_same_model or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    identifiers = [str(number) for number in range(len(gpus))]
    if VISIBLE in environ:
        identifiers = environ[VISIBLE].split(",")
    visible: list[Sequence[Gpu]] = []
    for identifier in map(str.strip, identifiers):
        if identifier.isdecimal() and int(identifier) < len(gpus):
            visible.append([gpus[int(identifier)]] if numbered else gpus)
        elif identifier.startswith("GPU-"):
            visible.append([gpu for gpu in gpus if gpu.uuid.startswith(identifier)])
        elif identifier.startswith("MIG-GPU-"):  # drivers before 470: GPU UUID and two numbers
            uuid = identifier.removeprefix("MIG-").split("/")[0]
            visible.append([gpu for gpu in gpus if gpu.uuid == uuid])
        elif identifier.startswith("MIG-"):  # only the driver's library knows its GPU
            visible.append(gpus)
        else:
            break
    return visible


# ---------------------------------------------------------------------------- NUMA domains


def _domain_of(
    root: Path,
    candidates: Sequence[Gpu],
    domains: Mapping[int, Set[int]],
) -> int | None:
    """Returns the NUMA domain with cores that is nearest to each of the candidates.

    Returns None if it is unknown or not the same for all of them.
    """
    candidate_domains = {_domain_of_gpu(root, gpu, domains) for gpu in candidates}
    return candidate_domains.pop() if len(candidate_domains) == 1 else None


def _domain_of_gpu(root: Path, gpu: Gpu, domains: Mapping[int, Set[int]]) -> int | None:
    try:
        domain = int(_read_text(root / "sys/bus/pci/devices" / gpu.name / "numa_node"))
        if domains.get(domain):
            return domain
        # The domain has memory only. (-1, of virtual machines without NUMA facts, has no folder.)
        path = _numa_folder(root) / f"node{domain}" / "distance"
        distances = map(int, _read_text(path).split())
        neighbors = zip(distances, sorted(domains), strict=True)
        _, nearest = min(pair for pair in neighbors if domains[pair[1]])
        return nearest
    except (OSError, ValueError):
        return None


def _cores_of_domains(root: Path) -> dict[int, Set[int]]:
    cores: dict[int, Set[int]] = {}
    for folder in _numa_folder(root).glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            cores[int(folder.name.removeprefix("node"))] = _parse_cpu_list(
                _read_text(folder / "cpulist")
            )
    return cores


def _numa_folder(root: Path) -> Path:
    return root / "sys/devices/system/node"


def _parse_cpu_list(cpu_list: str) -> set[int]:
    """Parses a list of cores as the kernel writes it: `0-15,32-47`."""
    cores: set[int] = set()
    for span in cpu_list.split(","):
        first, _, last = span.partition("-")
        if span:
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


def _read_text(path: Path) -> str:
    return path.read_text().strip()
