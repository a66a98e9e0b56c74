"""Finds out whether state would be offloaded to a folder on a remote file system, where offloading
gains nothing: refused for the run folder, which is the default, and warned of for a folder that the
plan names."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.plan.document import Train
from orchestrator.plan.offload import offload_of
from orchestrator.plan.worker import WorkerEnv
from trainer.errors import LayoutError, warn

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
        "coda",
        "gfs2",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smbfs",
        "wekafs",
    }
)
#: Types that a program serves which is known to ask other machines.
REMOTE_PROGRAMS = frozenset(
    {
        "fuse.blobfuse2",
        "fuse.ceph",
        "fuse.daos",
        "fuse.gcsfuse",
        "fuse.glusterfs",
        "fuse.goofys",
        "fuse.juicefs",
        "fuse.lizardfs",
        "fuse.mfs",
        "fuse.mount-s3",
        "fuse.rclone",
        "fuse.s3fs",
        "fuse.sshfs",
    }
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


def check_remote_disk(
    train: Train,
    scratch: Path,
    env: WorkerEnv,
    mounts: Path = MOUNTS,
) -> None:
    """Checks on every rank that state offloaded to a disk does not go over a network.

    `scratch` is the folder of a plan that names none. Raises LayoutError if that one is remote, and
    warns on standard error, once per node, if the one that the plan names is."""
    offload = offload_of(train)
    if "disk" not in (offload.optimizer, offload.activations):
        return
    folder = Path(offload.dir) if offload.dir else scratch
    kind = remote_type(folder, mounts)
    if kind is None:
        return
    network = "every step waits for the network, and files may stay after a crash"
    if not offload.dir:
        raise LayoutError(
            f"{env.node}: offloaded state would go to the run folder, {folder}, on {kind}:"
            f" {network}; name a folder on a local disk of each node, train.offload_dir=/PATH (or"
            " this folder, if the network is meant)"
        )
    if not env.local_rank:
        warn(
            f"{env.node}: offloaded state goes to train.offload_dir={folder}, on {kind}: {network}"
        )
