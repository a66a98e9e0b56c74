"""The code of a run: what the user saw when it was submitted."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from orchestrator.errors import OrchError
from orchestrator.run.code import snapshot
from orchestrator.run.code.left_out import describe_copy, with_left_out
from orchestrator.run.code.snapshot import copy, counted, find_code
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import Code
from tests.house.rooms import ROOT


def git(cwd: Path, *arguments: str) -> str:
    identity = [
        "-c",
        "user.name=t",
        "-c",
        "user.email=t@example.org",
        "-c",
        "protocol.file.allow=always",
    ]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=cwd, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def project(tmp_path):
    """A repository with a tracked, a changed, a new, an ignored and a deleted file."""
    root = tmp_path / "project"
    (root / "sub").mkdir(parents=True)
    files = {"kept.py": "kept", "changed.py": "old", "deleted.py": "x", ".gitignore": "*.log\n"}
    for name, content in (files | {"sub/deep ü\n.py": "deep"}).items():
        (root / name).write_text(content)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    (root / "changed.py").write_text("new")
    (root / "added.py").write_text("added")
    (root / "noise.log").write_text("noise")
    (root / "deleted.py").unlink()
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("kept.py")
    return root


def test_a_link_in_place_of_a_tracked_folder_is_a_link(project, folder, tmp_path):
    """git still lists the files that the folder had."""
    (tmp_path / "sub").mkdir()
    (project / "sub" / "deep ü\n.py").rename(tmp_path / "sub" / "deep ü\n.py")
    (project / "sub").rmdir()
    (project / "sub").symlink_to(tmp_path / "sub")
    copy(find_code(project, runs_user_program=True), folder)
    assert (folder.code / "sub").is_symlink()
    assert not [name for name in snapshot._listed_by_git(project) if name.startswith("sub/")]


def test_a_name_of_other_bytes_is_recorded_in_utf_8(project):
    (project / os.fsdecode(b"caf\xe9.log")).write_text("noise")
    code = with_left_out(find_code(project, runs_user_program=True))
    assert "caf\\xe9.log" in [file.name for file in code.left_out]


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "runs" / "run-1")
    run.create()
    return run


def contents(folder: RunFolder) -> dict[str, str]:
    return {
        str(p.relative_to(folder.code)): p.read_text()
        for p in folder.code.rglob("*")
        if p.is_file()
    }


def test_tracked_changed_and_new_but_not_ignored(project, folder):
    code = find_code(project / "sub", runs_user_program=True)
    assert (code.kind, code.root, code.subfolder, code.holds_orch) == (
        "git",
        str(project),
        "sub",
        False,
    )
    assert code.commit == git(project, "rev-parse", "HEAD").strip()
    copy(code, folder)
    assert contents(folder) == {
        "kept.py": "kept",
        "changed.py": "new",
        "added.py": "added",
        ".gitignore": "*.log\n",
        "sub/deep ü\n.py": "deep",
        "run.sh": "#!/bin/sh\n",
        "link": "kept",
    }
    assert os.access(folder.code / "run.sh", os.X_OK) and not os.access(
        folder.code / "kept.py", os.X_OK
    )
    assert (folder.code / "link").is_symlink()
    snapshot_record = json.loads(folder.snapshot.read_text())
    assert {"changed.py", "added.py", "deleted.py"} <= set(snapshot_record["uncommitted"])
    modes = {p.stat().st_mode & 0o077 for p in folder.code.rglob("*") if not p.is_symlink()}
    assert modes == {0}


def test_later_changes_do_not_reach_the_copy(project, folder):
    copy(find_code(project, runs_user_program=True), folder)
    (project / "kept.py").write_text("later")
    assert (folder.code / "kept.py").read_text() == "kept"


def test_submodules_are_opened(project, folder, tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "lib.py").write_text("lib")
    git(inner, "init", "-q")
    git(inner, "add", "-A")
    git(inner, "commit", "-qm", "inner")
    git(project, "submodule", "--quiet", "add", str(inner), "vendor")
    copy(find_code(project, runs_user_program=True), folder)
    assert (folder.code / "vendor" / "lib.py").read_text() == "lib"


def test_a_repository_without_a_commit(tmp_path, folder):
    root = tmp_path / "new"
    root.mkdir()
    git(root, "init", "-q")
    (root / "a.py").write_text("a")
    code = find_code(root, runs_user_program=True)
    assert code.commit is None
    copy(code, folder)
    assert contents(folder) == {"a.py": "a"}


def test_without_git(tmp_path, folder):
    root = tmp_path / "plain"
    for name in (
        "a.py",
        "pkg/b.py",
        ".hidden/c",
        ".secret",
        "__pycache__/d.pyc",
        "venv/pyvenv.cfg",
        "env2/pyvenv.cfg",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    code = find_code(root, runs_user_program=True)
    assert code == Code(kind="folder", root=str(root))
    copy(code, folder)
    assert set(contents(folder)) == {"a.py", "pkg/b.py"}


def test_an_orchignore_alone_decides_and_marks_the_folder_that_is_copied(project, folder):
    """It takes along what git ignores, and leaves tracked files out. Nothing that works only here
    is copied."""
    sub = project / "sub"
    content = "# data of other runs\nold/*\n!old/kept.log\n/top.py\n"
    for name in ("old/kept.log", "old/x", "top.py", "lib/top.py", ".venv/pyvenv.cfg", "deep/a.log"):
        (sub / name).parent.mkdir(parents=True, exist_ok=True)
        (sub / name).write_text(name)
    (sub / ".orchignore").write_text(content)
    (sub / "data").symlink_to("old")
    code = find_code(sub / "deep", runs_user_program=True)
    assert (code.root, code.subfolder, code.has_rules) == (str(sub), "deep", True)
    copy(code, folder)
    inner = ("old/kept.log", "lib/top.py", "deep/a.log")
    assert contents(folder) == {
        ".orchignore": content,
        "deep ü\n.py": "deep",
        **{name: name for name in inner},
    }
    assert (folder.code / "data").is_symlink()
    code = with_left_out(counted(code))
    assert (code.files, [file.name for file in code.left_out or []]) == (6, ["top.py", "old/x"])
    assert "leaves out top.py (6 B), old/x (5 B), by .orchignore" in describe_copy(code)[1]
    # a parent's file is not looked for above git's top folder, or above the folder without git
    (project.parent / ".orchignore").write_text("*")
    assert find_code(project, runs_user_program=True).kind == "git"
    (project.parent / "plain").mkdir()
    assert not find_code(project.parent / "plain", runs_user_program=True).has_rules


def test_the_run_folder_is_not_copied_into_itself(tmp_path):
    run = RunFolder(tmp_path / "home" / "runs" / "run-1")
    run.create()
    (tmp_path / "a.py").write_text("a")
    copy(Code(kind="folder", root=str(tmp_path)), run)
    assert set(contents(run)) == {"a.py"}


def test_the_bundled_trainer_needs_no_copy_of_a_foreign_project(project):
    assert find_code(project, runs_user_program=False) == Code(kind="none")


def test_a_checkout_of_orch_is_copied_for_the_bundled_trainer_too():
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    code = find_code(ROOT / "tests", runs_user_program=False)
    assert code.kind == "git" and code.holds_orch and code.subfolder == "tests"


def test_too_much_is_refused_naming_the_largest(project, folder, monkeypatch):
    monkeypatch.setattr(snapshot, "MOST_BYTES", 1 << 20)
    (project / "weights.bin").write_bytes(b"x" * (3 << 20))
    (project / "more.bin").write_bytes(b"x" * 2048)
    largest = (
        r"has 3.00 MiB, over 1.00 MiB \(largest: weights\.bin 3.00 MiB, more\.bin 2.00 KiB, .*\):"
        r" leave files out by \.orchignore, or"
    )
    with pytest.raises(OrchError, match=largest) as refused:
        copy(find_code(project, runs_user_program=True), folder)
    assert refused.value.exit == 65
    monkeypatch.setattr(snapshot, "MOST_FILES", 3)
    with pytest.raises(OrchError, match="more than 3 files"):
        copy(find_code(project, runs_user_program=True), folder)


def test_reading_a_repository_starts_no_program_of_its(project, folder, tmp_path):
    """`core.fsmonitor` of a repository names a program that `git status` would run."""
    mark = tmp_path / "mark"
    hook = tmp_path / "hook.sh"
    hook.write_text(f"#!/bin/sh\ntouch {mark}\n")
    hook.chmod(0o755)
    git(project, "config", "core.fsmonitor", str(hook))
    copy(find_code(project, runs_user_program=True), folder)
    assert not mark.exists()
