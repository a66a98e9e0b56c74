"""Packs the code and the config group files for another host into a tar, and unpacks them there."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run.code_snapshot import listed
from orchestrator.run.folder import make_private_folder
from orchestrator.run.request import Code

CODE = "code"
CONF = "conf"


def pack(code: Code, conf: Path | None) -> tuple[bytes, int, int]:
    """A compressed tar of the code and of group files, the number of code files, and their bytes.

    OrchError (65) when the code is too large to copy.
    """
    files, size = listed(code)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as tar:
        _add(tar, CODE, Path(code.root), files)
        if conf is not None:
            group_files = sorted(conf.rglob("*.yaml"))
            names = [str(path.relative_to(conf)) for path in group_files]
            _add(tar, CONF, conf, names)
    return out.getvalue(), len(files), size


def _add(tar: tarfile.TarFile, prefix: str, root: Path, names: Iterable[str]) -> None:
    for name in names:
        info = tar.gettarinfo(str(root / name), f"{prefix}/{name}")
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        if info.isreg():
            with (root / name).open("rb") as file:
                tar.addfile(info, file)
        elif info.issym():
            tar.addfile(info)


def unpack(payload: bytes, into: Path) -> None:
    """Unpacks regular files and links, each inside `into`. OrchError (78) for any other name."""
    with tarfile.open(fileobj=io.BytesIO(payload), mode="r:gz") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            top_folder = path.parts[:1]
            is_inside = not path.is_absolute() and ".." not in path.parts
            if not is_inside or top_folder not in ((CODE,), (CONF,)):
                raise OrchError(f"the shipped code holds {member.name!r}", Exit.SECURITY)
            target = into / path
            make_private_folder(target.parent)
            # an earlier link could lead outside
            if not target.parent.resolve().is_relative_to(into.resolve()):
                raise OrchError(f"the shipped code holds {member.name!r}", Exit.SECURITY)
            if member.issym():
                target.symlink_to(member.linkname)
            elif (source := tar.extractfile(member)) is not None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                mode = 0o700 if member.mode & 0o100 else 0o600
                descriptor = os.open(target, flags, mode)
                with os.fdopen(descriptor, "wb") as file:
                    while chunk := source.read(1 << 20):
                        file.write(chunk)
