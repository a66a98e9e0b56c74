"""Packs the files of a program into a compressed archive, and unpacks it on another machine without
trusting what it holds."""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

_CHUNK = 1 << 20


def pack(root: Path, names: Iterable[str]) -> bytes:
    """Returns a compressed archive of the files and links, the same bytes for the same content:
    without times, users and their rights."""
    out = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=out, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as tar,
    ):
        add_files(tar, root, sorted(names))
    return out.getvalue()


def add_files(
    tar: tarfile.TarFile,
    root: Path,
    names: Iterable[str],
    prefix: str = "",
) -> None:
    """Adds files and links, named relative to the root; whoever unpacks them may execute those that
    are executable here."""
    for name in names:
        path = root / name
        info = tarfile.TarInfo(prefix + name)
        if path.is_symlink():
            info.type = tarfile.SYMTYPE
            info.linkname = os.readlink(path)
            tar.addfile(info)
            continue
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            info.size = status.st_size
            info.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
            tar.addfile(info, file)


def unpack(payload: bytes, into: Path, links_may_leave: bool = False) -> None:
    """Unpacks regular files and links into a folder, private to this user. OrchError (78) for a
    name outside of it, anything else than a file or a link, and, unless `links_may_leave`, a link
    that leads out of it; 65 if it is not an archive."""
    folder = into.resolve()
    try:
        with tarfile.open(fileobj=io.BytesIO(payload), mode="r:gz") as tar:
            for member in tar:
                _unpack_member(tar, member, folder, links_may_leave)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile) as error:
        raise OrchError(f"the packed code is damaged: {error}", Exit.CONFIG) from None


def _unpack_member(
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    into: Path,
    links_may_leave: bool,
) -> None:
    path = PurePosixPath(member.name)
    target = into / path
    is_inside = not path.is_absolute() and ".." not in path.parts and target != into
    if not is_inside or not (member.isreg() or member.issym()):
        raise _unsafe(member)
    if target.parent.resolve() != target.parent:  # below a link that was unpacked before
        raise _unsafe(member)
    for folder in reversed(path.parents[:-1]):
        (into / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    if member.issym():
        if not (links_may_leave or stays_inside(member.name, member.linkname)):
            raise _unsafe(member)
        target.symlink_to(member.linkname)
        return
    source = tar.extractfile(member)
    assert source is not None  # it is a regular file
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    mode = 0o700 if member.mode & stat.S_IXUSR else 0o600
    with os.fdopen(os.open(target, flags, mode), "wb") as file:
        while chunk := source.read(_CHUNK):
            file.write(chunk)


def _unsafe(member: tarfile.TarInfo) -> OrchError:
    return OrchError(f"the packed code holds {member.name!r}, which is unsafe", Exit.SECURITY)


def stays_inside(name: str, target: str) -> bool:
    """Tells whether a link cannot lead out of the packed folder, whatever other links it passes: it
    goes up by no more folders than it is deep, and then only down."""
    steps = PurePosixPath(target).parts
    ups = 0
    while ups < len(steps) and steps[ups] == "..":
        ups += 1
    depth = len(PurePosixPath(name).parts) - 1
    return not target.startswith("/") and ups <= depth and ".." not in steps[ups:]
