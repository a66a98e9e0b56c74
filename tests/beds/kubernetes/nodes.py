"""Real nodes of the bed: a containerd and a kubelet each, with folders, sockets and ports of their
own."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.run.processes import descendants
from tests.beds.debian import find

from . import bed_conf as conf
from . import image
from .building import program

if TYPE_CHECKING:
    from .bed import Bed

WEIGHT = 6144  # cpu.shares of all pods together; one process has 1024
RACKS = 2  # real nodes alternate between this many, so that a topology has something to say


def labels(index: int) -> dict[str, str]:
    return {"orch.test/rack": f"rack-{index % RACKS}", "orch.test/kind": "real"}


def start_all(bed: Bed) -> None:
    """Starts all nodes at once: each spends most of its start on the image."""
    image.pause_archive(bed.home / "pause.tar")
    image.orch_archive(bed.home / "orch.tar")
    with ThreadPoolExecutor() as pool:
        list(pool.map(partial(start, bed), range(bed.shape.nodes)))


def start(bed: Bed, index: int, again: bool = False) -> None:
    """`again`: after `kill`, with the folder as it was left."""
    node = conf.node_folder(bed.home, index)
    if not again:
        for folder in (
            node / "cni",
            node / "pod-logs",
            node / "kubelet",
            node / "opt",
            node / "containerd",
        ):
            folder.mkdir(parents=True)
        # Images in memory, 0.4 GB a node: nothing waits for the disk, nor deletes their files.
        bed.run("mount", "-t", "tmpfs", "tmpfs", str(node / "containerd"))
        (node / "containerd.toml").write_text(conf.containerd_toml(node))
        (node / "cni" / "10-bed.conflist").write_text(conf.cni_conflist(node, index))
        (node / "kubelet.yaml").write_text(conf.kubelet_yaml(node, index))
    bed.daemon(
        f"containerd-{index}",
        find("containerd") or "containerd",
        "--config",
        str(node / "containerd.toml"),
    )
    bed.wait(
        lambda: _ctr(bed, node, "version", check=False), 30, "containerd", f"containerd-{index}"
    )
    if not again:
        _load(bed, node)
    _weigh()
    node_labels = ",".join(f"{key}={value}" for key, value in labels(index).items())
    kubelet = node / "kubelet"
    flags = [
        f"--config={node}/kubelet.yaml",
        f"--kubeconfig={bed.home}/admin.kubeconfig",
        f"--root-dir={kubelet}",
    ]
    flags += [
        f"--cert-dir={kubelet}/pki",
        f"--hostname-override=node-{index}",
        f"--node-ip={conf.HOST}",
    ]
    bed.daemon(f"kubelet-{index}", program("kubelet"), *flags, f"--node-labels={node_labels}")


def _weigh() -> None:
    """All containers of a machine share one cgroup, which by itself weighs as much as one process
    outside of it."""
    group = Path("/sys/fs/cgroup/cpu/k8s.io")
    with suppress(OSError):  # cgroup v2 has another way, and other beds may be taking theirs down
        if (group.parent / "cpu.shares").exists():
            group.mkdir(exist_ok=True)
            (group / "cpu.shares").write_text(str(WEIGHT))


def wait_ready(bed: Bed, name: str, ready: bool = True, seconds: float = 300) -> None:
    def found() -> bool:
        path = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
        ready_status = bed.kubectl("get", "node", name, "-o", path, check=False)
        return (ready_status == "True") == ready and ready_status != ""

    bed.wait(
        found,
        seconds,
        f"{'ready' if ready else 'dead'} node {name}",
        f"kubelet-{name.removeprefix('node-')}",
    )


def kill(bed: Bed, index: int) -> None:
    """The node vanishes, as when its power is cut: kubelet, containerd, shims and every container,
    at once."""
    node = str(conf.node_folder(bed.home, index)) + "/"
    everything = list(
        dict.fromkeys(pid for root in bed.pids(node) for pid in (root, *descendants(root)))
    )
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in everything:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)


def _load(bed: Bed, node: Path) -> None:
    """Images into the node's store."""
    for name in ("pause", "orch"):
        _ctr(bed, node, "-n", "k8s.io", "images", "import", str(bed.home / f"{name}.tar"))


def _ctr(bed: Bed, node: Path, *argv: str, check: bool = True) -> bool:
    ctr = find("ctr") or "ctr"
    return (
        bed.run(
            ctr, "--address", f"{node}/containerd.sock", *argv, check=check, timeout=300
        ).returncode
        == 0
    )


# ------------------------------------------------------------------------------------------ volumes


def volume(bed: Bed, name: str, path: Path, read_only: bool, namespace: str = "default") -> None:
    """A claim `name` bound to a folder of this machine, which all nodes share."""
    mode = "ReadOnlyMany" if read_only else "ReadWriteMany"
    common = {"accessModes": [mode], "storageClassName": ""}
    size = {"storage": "10Gi"}
    about = {"namespace": namespace, "name": name}
    volume_name = f"{namespace}-{name}"
    bed.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume_name},
         "spec": {**common, "capacity": size, "hostPath": {"path": str(path)}, "claimRef": about,
                  "persistentVolumeReclaimPolicy": "Retain"}},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": about,
         "spec": {**common, "resources": {"requests": size}, "volumeName": volume_name}},
    )  # fmt: skip
