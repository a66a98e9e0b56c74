"""A program's folder as one archive: the same bytes for the same content, unpacked without trust."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from orchestrator.plan import Exit
from orchestrator.run.code.archive import pack, stays_inside, unpack
from tests.beds.bundles import refusal


def fill(root: Path) -> list[str]:
    (root / "pkg").mkdir(parents=True)
    (root / "train.py").write_text("import pkg")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "pkg" / "ü\udcff.bin").write_bytes(bytes(range(256)) * 9000)
    os.link(root / "train.py", root / "pkg" / "same.py")
    (root / "pkg" / "link").symlink_to("../train.py")
    return [str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()]


def test_the_same_content_is_the_same_archive_and_arrives_whole(tmp_path):
    names = fill(tmp_path / "a")
    archive = pack(tmp_path / "a", names)
    fill(tmp_path / "b")
    for path in (tmp_path / "b").rglob("*"):
        os.utime(path, (1, 1), follow_symlinks=False)
    assert archive == pack(tmp_path / "b", reversed(names))
    (tmp_path / "c").mkdir()
    unpack(archive, tmp_path / "c")
    for name in names:
        original = tmp_path / "a" / name
        arrived = tmp_path / "c" / name
        assert arrived.read_bytes() == original.read_bytes()
        assert arrived.is_symlink() == original.is_symlink()
        assert os.access(arrived, os.X_OK) == os.access(original, os.X_OK)
    assert archive != pack(tmp_path / "a", names[1:])


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    return info


@pytest.mark.parametrize(
    "members",
    [
        [member("/etc/x")],
        [member("../x")],
        [member("a/../../x")],
        [member(".")],
        [member("a", tarfile.LNKTYPE, "/etc/passwd")],
        [member("a", tarfile.CHRTYPE)],
        [member("a", tarfile.FIFOTYPE)],
        [member("a", tarfile.SYMTYPE, "/etc")],
        [member("a", tarfile.SYMTYPE, "../x")],
        [member("d/a", tarfile.SYMTYPE, "../../x")],
        [member("a", tarfile.SYMTYPE, "."), member("b", tarfile.SYMTYPE, "a/..")],
        [member("d/x"), member("a", tarfile.SYMTYPE, "d"), member("a/y")],
    ],
    ids=lambda members: " ".join(f"{m.name}>{m.linkname}" for m in members),
)
def test_nothing_is_written_or_linked_outside(tmp_path, members):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for info in members:
            tar.addfile(info)
    (tmp_path / "in").mkdir()
    with refusal("which is unsafe", Exit.SECURITY):
        unpack(out.getvalue(), tmp_path / "in")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_links_within_are_packed_and_others_are_known():
    for name, target in (("a", "b"), ("d/a", "../b"), ("d/e/a", "../../b/c"), ("a", ".")):
        assert stays_inside(name, target)
    for name, target in (("a", ".."), ("d/a", "../.."), ("a", "/b"), ("d/a", "b/../c")):
        assert not stays_inside(name, target)


def test_a_cut_archive_is_one_line(tmp_path):
    names = fill(tmp_path / "a")
    (tmp_path / "c").mkdir()
    with refusal("is damaged", Exit.CONFIG):
        unpack(pack(tmp_path / "a", names)[:-20], tmp_path / "c")
