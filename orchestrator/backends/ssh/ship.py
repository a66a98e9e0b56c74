"""Packs the code and the config group files for another host into a tar, and unpacks them there."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from orchestrator.run.code import archive as code_archive
from orchestrator.run.code.snapshot import listed
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
        code_archive.add_files(tar, Path(code.root), files, f"{CODE}/")
        if conf is not None:
            group_files = sorted(conf.rglob("*.yaml"))
            names = [str(path.relative_to(conf)) for path in group_files]
            code_archive.add_files(tar, conf, names, f"{CONF}/")
    return out.getvalue(), len(files), size


def unpack(payload: bytes, into: Path) -> None:
    """Unpacks regular files and links, which may lead to other folders of the host. OrchError (78)
    for any other name."""
    code_archive.unpack(payload, into, links_may_leave=True)
