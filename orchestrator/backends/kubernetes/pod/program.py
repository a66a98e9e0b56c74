"""Unpacks the program of a run in its pod."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.backends.kubernetes.objects.code_maps import check_archive, chunk_key, chunk_names
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run.code import archive as code_archive
from orchestrator.run.request import LaunchRequest


def unpack_code(request: LaunchRequest, mounted: Path, code_root: Path) -> None:
    """Unpacks the run's program, if one travels, into a folder of `code_root` that only this run
    has; later attempts of the pod find it there. `mounted`: the folder with its chunks.

    OrchError (78) if a chunk is missing, or if they are not what was submitted.
    """
    packed = request.code.packed
    folder = code_root / request.run_id
    if not packed or folder.exists():
        return
    chunks = [mounted / chunk_key(index) for index in range(len(chunk_names(packed)))]
    try:
        archive = b"".join(chunk.read_bytes() for chunk in chunks)
    except OSError as error:
        raise OrchError(f"the program's code: {error}", Exit.SECURITY) from None
    check_archive(packed, archive)
    code_root.mkdir(mode=0o700, parents=True, exist_ok=True)
    unpacked = code_root / f".{os.urandom(8).hex()}"
    unpacked.mkdir(mode=0o700)
    code_archive.unpack(archive, unpacked)
    (unpacked / request.code.subfolder).mkdir(mode=0o700, parents=True, exist_ok=True)
    unpacked.rename(folder)
