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
    seen = _visible_gpus(_gpus(root), environ)
    if not seen or not (len(seen) == workers or (one_gpu_each and len(seen) > workers)):
        return Binding(free)
    for name in _OWN_BINDING:
        if environ.get(name, "").lower() not in _NO_BINDING:
            return Binding(free, f"{name} is set")
    found = [_domain_of(root, candidates, domains) for candidates in seen[:workers]]
    cores = free
    reason = ""
    for domain in sorted({one for one in found if one is not None}):
        ours = found.count(domain)
        here = domains[domain] & allowed
        if len(here) < max(ours, _LEAST_SHARE * len(allowed) * ours / workers):
            reason = (
                f"{ours} of {workers} workers have a GPU of NUMA domain {domain}, where this job"
                " may use "
            )
            reason += f"{len(here)} of its {len(allowed)} cores"
        else:
            cores = [here if one == domain else had for one, had in zip(found, cores, strict=True)]
    return Binding(cores, reason)


def narrowed(environ: Mapping[str, str], gpus: Sequence[int]) -> dict[str, str]:
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


def as_list(cores: Set[int]) -> str:
    """As the kernel writes it: `0-15,32-47`."""
    runs = [
        [core for _, core in run]
        for _, run in groupby(enumerate(sorted(cores)), lambda one: one[1] - one[0])
    ]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


# ------------------------------------------------------------------------------------------ GPUs


def _gpus(root: Path) -> list[Gpu]:
    """The NVIDIA GPUs that this process may open, in the order in which CUDA numbers those of one
    model."""
    found: list[Gpu] = []
    for folder in root.glob("proc/driver/nvidia/gpus/*"):
        with contextlib.suppress(OSError, ValueError):  # one that fell off the bus
            lines = (folder / "information").read_text().splitlines()
            facts = {
                name.strip(): value.strip()
                for name, _, value in (line.partition(":") for line in lines)
            }
            address = tuple(int(part, 16) for part in folder.name.replace(".", ":").split(":"))
            device = root / "dev" / f"nvidia{facts.get('Device Minor', '')}"
            # Slurm's devices cgroup leaves the files and denies the access
            if (
                len(address) == 4
                and facts.get("GPU Excluded") != "Yes"
                and os.access(device, os.R_OK | os.W_OK)
            ):
                found.append(Gpu(address, facts.get("GPU UUID", ""), facts.get("Model", "")))
    return sorted(found, key=lambda gpu: gpu.address)


def _visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Sequence[Gpu]]:
    """What a program sees as GPU 0, 1 and so on: for each the GPUs that it may be, which is one
    where the number or name says it. As CUDA reads the variable, the list ends at the first word
    that is none."""
    numbered = (
        len({gpu.model for gpu in gpus}) == 1 or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    )
    words = (
        environ[VISIBLE].split(",")
        if VISIBLE in environ
        else [str(number) for number in range(len(gpus))]
    )
    found: list[Sequence[Gpu]] = []
    for word in map(str.strip, words):
        if word.isdecimal() and int(word) < len(gpus):
            found.append([gpus[int(word)]] if numbered else gpus)
        elif word.startswith("GPU-"):
            found.append([gpu for gpu in gpus if gpu.uuid.startswith(word)])
        elif word.startswith("MIG-GPU-"):  # its GPU's UUID and two numbers: of drivers before 470
            found.append(
                [gpu for gpu in gpus if gpu.uuid == word.removeprefix("MIG-").split("/")[0]]
            )
        elif word.startswith(
            "MIG-"
        ):  # a part of some GPU; only the driver's library knows of which
            found.append(gpus)
        else:
            break
    return found


# ------------------------------------------------------------------------------------------ NUMA
#     domains


def _domain_of(
    root: Path, candidates: Sequence[Gpu], domains: Mapping[int, Set[int]]
) -> int | None:
    """The domain with cores that is nearest to whichever of the GPUs it is; None where that is not
    known."""
    found = {_domain_of_gpu(root, gpu, domains) for gpu in candidates}
    return found.pop() if len(found) == 1 else None


def _domain_of_gpu(root: Path, gpu: Gpu, domains: Mapping[int, Set[int]]) -> int | None:
    try:
        domain = int(_read(root / "sys/bus/pci/devices" / gpu.name / "numa_node"))
        if domains.get(domain):
            return domain
        # domains of memory alone; -1, of a virtual machine that does not say it, has no folder
        row = map(int, _read(_folder(root) / f"node{domain}" / "distance").split())
        reach = zip(row, sorted(domains), strict=True)
        return min((far, other) for far, other in reach if domains[other])[1]
    except (OSError, ValueError):
        return None


def _cores_of_domains(root: Path) -> dict[int, Set[int]]:
    found: dict[int, Set[int]] = {}
    for folder in _folder(root).glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            found[int(folder.name.removeprefix("node"))] = _cores(_read(folder / "cpulist"))
    return found


def _folder(root: Path) -> Path:
    return root / "sys/devices/system/node"


def _cores(text: str) -> set[int]:
    """Of a list as the kernel writes it: `0-15,32-47`."""
    spans = [part.partition("-") for part in text.split(",") if part]
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}


def _read(path: Path) -> str:
    return path.read_text().strip()
