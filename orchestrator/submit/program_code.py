"""Chooses the code of a run: the folder itself, a copy of it, or an archive for the backend."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run.request import Code, PackedCode
from orchestrator.style import binary

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend

    from .submission import SubmitOptions


class ProgramCode(NamedTuple):
    code: Code
    archive: bytes = b""  # of `code.packed`


def program_code(backend: Backend, options: SubmitOptions) -> ProgramCode:
    """Finds the code of a run, counts its files, and packs them where nodes do not share folders.
    OrchError (65) if it is too much."""
    from orchestrator.run.code.snapshot import counted

    try:
        code = _chosen_code(backend, options)
        if not options.command or code.kind == "none":
            return ProgramCode(code)
        if not backend.most_code_bytes:
            return ProgramCode(code if options.code else counted(code))
        return _packed(code, backend.most_code_bytes)
    except OSError as error:  # a file that this user may not read, or that has just been deleted
        raise OrchError(f"the program's folder cannot be copied: {error}", Exit.CONFIG) from None


def _chosen_code(backend: Backend, options: SubmitOptions) -> Code:
    from orchestrator.run.code.left_out import with_left_out
    from orchestrator.run.code.snapshot import find_code

    if options.code is not None:
        return options.code
    in_place = options.in_place
    if in_place is None:
        in_place = bool(options.command) and backend.shares_folders
    if in_place:
        return Code(kind="none")
    code = find_code(options.cwd, runs_user_program=bool(options.command))
    if not options.command or code.kind == "none":
        return code
    return with_left_out(code)


def _packed(code: Code, most_bytes: int) -> ProgramCode:
    """Packs the files, without links that lead out of the folder: elsewhere they lead nowhere."""
    from orchestrator.run.code.archive import pack, stays_inside
    from orchestrator.run.code.left_out import in_utf8
    from orchestrator.run.code.snapshot import ADVICE, largest, listed

    root = Path(code.held_at or code.root)
    files, _ = listed(code)
    names = []
    outside_links = []
    for name in files:
        path = root / name
        if path.is_symlink() and not stays_inside(name, str(path.readlink())):
            outside_links.append(in_utf8(name))
        else:
            names.append(name)
    archive = pack(root, names)
    if len(archive) > most_bytes:
        raise OrchError(
            f"the packed copy of {code.root} has {binary(len(archive))}, over"
            f" {binary(most_bytes)} ({largest(root, names)}): {ADVICE}, or build the program into"
            " the image and submit it with --in-place",
            Exit.CONFIG,
        )
    packed = PackedCode(
        sha256=hashlib.sha256(archive).hexdigest(),
        bytes=len(archive),
        outside_links=outside_links,
    )
    size = sum((root / name).lstat().st_size for name in names)
    code = structs.replace(
        code,
        packed=packed,
        files=len(names),
        bytes=size,
    )
    return ProgramCode(code, archive)
