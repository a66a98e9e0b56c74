"""Warns if state is offloaded to a folder on a remote file system, where offloading gains
nothing."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.plan.document import Train
from orchestrator.plan.offload import offload_of
from orchestrator.plan.worker import WorkerEnv
from trainer.errors import warn

MOUNTS = Path("/proc/self/mounts")
#: Types of file systems that other machines serve, as the kernel names them.
REMOTE = frozenset(
    {
        "nfs",
        "nfs4",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "cifs",
        "smb3",
        "9p",
        "afs",
        "orangefs",
        "wekafs",
    }
)
#: Types that a program serves which is known to ask other machines.
REMOTE_PROGRAMS = frozenset(
    {"fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.juicefs", "fuse.s3fs", "fuse.gcsfuse"}
)


def remote_type(folder: Path, mounts: Path = MOUNTS) -> str | None:
    """Returns the type of the remote file system that holds `folder`, or None if it is local or
    unknown."""
    folder = folder.resolve()
    deepest = ""
    depth = -1
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        point, kind = (_plain(field) for field in line.split(" ")[1:3])
        # A later mount covers an earlier one of the same depth.
        if folder.is_relative_to(point) and len(Path(point).parts) >= depth:
            deepest = kind
            depth = len(Path(point).parts)
    return deepest if deepest in REMOTE | REMOTE_PROGRAMS else None


def _plain(field: str) -> str:
    """Decodes blanks and other characters that are written as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)


def remote_warning(folder: Path, mounts: Path = MOUNTS) -> str | None:
    """Returns a line of warning for a folder of offloaded state on a remote file system, or
    None."""
    kind = remote_type(folder, mounts)
    if kind is None:
        return None
    return (
        f"offloaded state goes to {folder}, on {kind}: every step waits for the network, and files"
        " may stay after a crash; name a folder on a local disk of each node,"
        " train.offload_dir=/PATH"
    )


def warn_of_remote_disk(train: Train, scratch: Path, env: WorkerEnv) -> None:
    """Warns on standard error, once per node, if state offloaded to a disk goes over a network.
    `scratch` is the folder of a plan that names none."""
    offload = offload_of(train)
    if env.local_rank or "disk" not in (offload.optimizer, offload.activations):
        return
    warning = remote_warning(Path(offload.dir) if offload.dir else scratch)
    if warning:
        warn(f"{env.node}: {warning}")
