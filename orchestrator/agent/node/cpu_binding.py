"""Binds each worker to the cores of its GPU's NUMA domain, so that its copies to the GPU cross no
link of the sockets.

This is what torchrun's `--numa-binding=node` does, without numactl and without starting CUDA.
Workers of one domain share its cores: a split would leave the cores of a worker that waits idle
while the data loader of another one has too few. Memory follows by first touch, for the pages of a
bound worker are allocated where it runs; there is no strict memory policy, which would end a worker
whose domain is full. What a worker starts (data loaders) inherits its cores.

Which GPU is whose is read from the driver's files and from those of the kernel, which cost nothing
and never hang. A worker stays free where that leaves a doubt. `root` is the folder in which /proc,
/sys and /dev are looked for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
#: By these a program binds its threads itself, unless they have one of the values after them.
_OWN_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")
_NO_BINDING = ("", "false", "none", "disabled")
_LEAST_SHARE = 0.25  # of the cores that a worker would have without a binding


@dataclass(frozen=True)
class Gpu:
    address: tuple[int, ...]  # PCI domain, bus, device and function, as in 0000:19:00.0
    uuid: str
    model: str

    @property
    def name(self) -> str:
        """Its folder in /sys/bus/pci/devices."""
        domain, bus, device, function = self.address
        return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


@dataclass(frozen=True)
class Binding:
    """`cores`: of each worker, by local rank; none of a worker that stays free. `reason`: why one
    does that could have been bound, "" for nothing worth saying."""

    cores: list[Set[int]]
    reason: str = ""


def bind(
    root: Path, environ: Mapping[str, str], allowed: Set[int], workers: int, one_gpu_each: bool
) -> Binding:
    """Which cores the workers of this node get.

    `environ`: what they will see; `allowed`: the cores that this process may use; `one_gpu_each`:
    worker i computes on the i-th GPU that it sees, even where it sees more of them.
    """
    free: list[Set[int]] = [set()] * workers
    domains = _cores_of_domains(root)
    if sum(map(bool, domains.values())) < 2:
        return Binding(free)
    visible_gpus = _visible_gpus(_gpus(root), environ)
    if not visible_gpus or not (
        len(visible_gpus) == workers or (one_gpu_each and len(visible_gpus) > workers)
    ):
        return Binding(free)
    for name in _OWN_BINDING:
        if environ.get(name, "").lower() not in _NO_BINDING:
            return Binding(free, f"{name} is set")
    worker_domains = [
        _domain_of(root, candidates, domains) for candidates in visible_gpus[:workers]
    ]
    cores = free
    reason = ""
    for domain in sorted(
        {worker_domain for worker_domain in worker_domains if worker_domain is not None}
    ):
        bound_workers = worker_domains.count(domain)
        domain_cores = domains[domain] & allowed
        if len(domain_cores) < max(
            bound_workers, _LEAST_SHARE * len(allowed) * bound_workers / workers
        ):
            reason = (
                f"{bound_workers} of {workers} workers have a GPU of NUMA domain {domain}, where this job"
                " may use "
            )
            reason += f"{len(domain_cores)} of its {len(allowed)} cores"
        else:
            cores = [
                domain_cores if worker_domain == domain else worker_cores
                for worker_domain, worker_cores in zip(worker_domains, cores, strict=True)
            ]
    return Binding(cores, reason)


def device_visibility(environ: Mapping[str, str], gpus: Sequence[int]) -> dict[str, str]:
    """The variable by which workers see those GPUs alone, counted among the ones that `environ`
    lets them see; nothing where they are the first ones."""
    if list(gpus) == list(range(len(gpus))):
        return {}
    names = (
        environ[VISIBLE].split(",")
        if VISIBLE in environ
        else [str(gpu) for gpu in range(max(gpus) + 1)]
    )
    return {VISIBLE: ",".join(names[gpu].strip() for gpu in gpus)} if max(gpus) < len(names) else {}


def format_cpu_list(cores: Set[int]) -> str:
    """As the kernel writes it: `0-15,32-47`."""
    runs = [
        [core for _, core in run]
        for _, run in groupby(
            enumerate(sorted(cores)), lambda numbered_core: numbered_core[1] - numbered_core[0]
        )
    ]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


# ------------------------------------------------------------------------------------------ GPUs


def _gpus(root: Path) -> list[Gpu]:
    """The NVIDIA GPUs that this process may open, in the order in which CUDA numbers those of one
    model."""
    gpus: list[Gpu] = []
    for folder in root.glob("proc/driver/nvidia/gpus/*"):
        with contextlib.suppress(OSError, ValueError):  # one that fell off the bus
            lines = (folder / "information").read_text().splitlines()
            facts = {
                name.strip(): value.strip()
                for name, _, value in (line.partition(":") for line in lines)
            }
            address = tuple(int(number, 16) for number in folder.name.replace(".", ":").split(":"))
            device = root / "dev" / f"nvidia{facts.get('Device Minor', '')}"
            # Slurm's devices cgroup leaves the files and denies the access
            if (
                len(address) == 4
                and facts.get("GPU Excluded") != "Yes"
                and os.access(device, os.R_OK | os.W_OK)
            ):
                gpus.append(Gpu(address, facts.get("GPU UUID", ""), facts.get("Model", "")))
    return sorted(gpus, key=lambda gpu: gpu.address)


def _visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Sequence[Gpu]]:
    """What a program sees as GPU 0, 1 and so on: for each the GPUs that it may be, which is one
    where the number or name says it. As CUDA reads the variable, the list ends at the first word
    that is none."""
    numbered = (
        len({gpu.model for gpu in gpus}) == 1 or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    )
    identifiers = (
        environ[VISIBLE].split(",")
        if VISIBLE in environ
        else [str(number) for number in range(len(gpus))]
    )
    visible: list[Sequence[Gpu]] = []
    for identifier in map(str.strip, identifiers):
        if identifier.isdecimal() and int(identifier) < len(gpus):
            visible.append([gpus[int(identifier)]] if numbered else gpus)
        elif identifier.startswith("GPU-"):
            visible.append([gpu for gpu in gpus if gpu.uuid.startswith(identifier)])
        elif identifier.startswith(
            "MIG-GPU-"
        ):  # its GPU's UUID and two numbers: of drivers before 470
            visible.append(
                [gpu for gpu in gpus if gpu.uuid == identifier.removeprefix("MIG-").split("/")[0]]
            )
        elif identifier.startswith(
            "MIG-"
        ):  # a part of some GPU; only the driver's library knows of which
            visible.append(gpus)
        else:
            break
    return visible


# ------------------------------------------------------------------------------------------ NUMA
#     domains


def _domain_of(
    root: Path, candidates: Sequence[Gpu], domains: Mapping[int, Set[int]]
) -> int | None:
    """The domain with cores that is nearest to whichever of the GPUs it is; None where that is not
    known."""
    candidate_domains = {_domain_of_gpu(root, gpu, domains) for gpu in candidates}
    return candidate_domains.pop() if len(candidate_domains) == 1 else None


def _domain_of_gpu(root: Path, gpu: Gpu, domains: Mapping[int, Set[int]]) -> int | None:
    try:
        domain = int(_read_text(root / "sys/bus/pci/devices" / gpu.name / "numa_node"))
        if domains.get(domain):
            return domain
        # domains of memory alone; -1, of a virtual machine that does not say it, has no folder
        distances = map(int, _read_text(_numa_folder(root) / f"node{domain}" / "distance").split())
        domains_by_distance = zip(distances, sorted(domains), strict=True)
        return min(
            (distance, neighbor) for distance, neighbor in domains_by_distance if domains[neighbor]
        )[1]
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
    """Of a list as the kernel writes it: `0-15,32-47`."""
    spans = [span.partition("-") for span in cpu_list.split(",") if span]
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}


def _read_text(path: Path) -> str:
    return path.read_text().strip()
