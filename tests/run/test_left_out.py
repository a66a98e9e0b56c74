"""What a copy lacks is listed with its size before the start, and named when the program misses
it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from orchestrator.run.code.left_out import describe_copy, explain, with_left_out
from orchestrator.run.code.snapshot import copy, counted, find_code
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import Code, PackedCode
from orchestrator.run.state import read_state
from tests.backends.test_verbs import home, orch
from tests.beds.bundles import wait_end

__all__ = ["home"]  # the fixture


def fill(root: Path, git: bool) -> Path:
    """A program with ignored data, weights, caches, an environment and an empty folder."""
    sizes = {
        "train.py": 1,
        "data/a.bin": 3000,
        "data/deep/b.bin": 1024,
        "sub/w.pt": 2 << 20,
        "sub/lib/x.py": 1,
        "sub/a.py": 1,
    }
    sizes |= {
        ".venv/pyvenv.cfg": 1,
        "venv/pyvenv.cfg": 9,
        "sub/__pycache__/t.pyc": 99,
        ".env": 10,
        "build/o": 7,
    }
    for name, size in sizes.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x" * size)
    (root / "empty").mkdir()
    if git:
        (root / ".gitignore").write_text(
            "data/\n*.pt\n__pycache__\n.venv\nvenv\n.env\nbuild\nlib\n"
        )
        subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def test_what_git_ignores_is_listed_by_size_without_caches(tmp_path):
    code = with_left_out(find_code(fill(tmp_path / "p", git=True), runs_user_program=True))
    sizes = {file.name: file.bytes for file in code.left_out or []}
    assert list(sizes) == ["sub/w.pt", "data/", ".env", "build/", "sub/lib/"]
    assert sizes["data/"] == 4024
    (line,) = describe_copy(code)  # nobody has counted its files
    assert (
        "leaves out sub/w.pt (2.00 MiB), data/ (3.93 KiB), .env (10 B), build/ (7 B)" in line
        and "git ignores" in line
    )


def test_without_git_the_names_decide(tmp_path):
    code = with_left_out(find_code(fill(tmp_path / "p", git=False), runs_user_program=True))
    assert [file.name for file in code.left_out or []] == [".env", "build/"]
    assert "by their names" in describe_copy(code)[0]
    (tmp_path / "q").mkdir()
    assert describe_copy(with_left_out(Code(kind="folder", root=str(tmp_path / "q")))) == []


def test_where_the_folder_is_not_another_orchignore_is_the_way_out(tmp_path):
    root = fill(tmp_path / "p", git=True)
    code = with_left_out(counted(find_code(root, runs_user_program=True)))
    packed = structs.replace(code, packed=PackedCode("ab", 2048, ["data", "w"]))
    size, left_out, links = describe_copy(packed)
    assert size.endswith("has 3 files, 51 B (2.00 KiB compressed)")
    assert left_out.endswith("which git ignores: an .orchignore can include them")
    assert links.endswith("leaves out links to elsewhere: data, w")
    pod = Path("/orch/code/run-1/sub")
    line = "FileNotFoundError: [Errno 2] No such file or directory: '../data/a.bin'"
    cause = explain(structs.replace(packed, subfolder="sub"), pod, [line])
    assert cause and cause.startswith(f"data/a.bin is not in the copy of {root} that")
    assert cause.endswith(
        "it is a link that leads out of the copied folder; an .orchignore can include it"
    )
    shipped = structs.replace(code, held_at="/x")
    assert describe_copy(shipped)[1].endswith("an .orchignore can include them")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "FileNotFoundError: [Errno 2] No such file or directory: 'data/deep/b.bin'",
            "git ignores it",
        ),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: '{code}/data/a.bin'",
            "data/a.bin is not in",
        ),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: './sub/../data/new.bin'",
            "git ignores it",
        ),
        ("cat: sub/w.pt: No such file or directory", "sub/w.pt is not in the copy of {root}"),
        ("python: can't open file '{code}/build/o': [Errno 2] No such file", "build/o is not in"),
        ("ModuleNotFoundError: No module named 'sub.lib'", "sub/lib is not in"),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: 'empty/log.txt'",
            "empty/ is not in",
        ),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: '../other/x'",
            "is outside the copied folder",
        ),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: 'later.txt'",
            "did not exist when the run was submitted",
        ),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'nowhere.txt'", None),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/etc/nothing'", None),
        ("ModuleNotFoundError: No module named 'numpie'", None),
    ],
)
def test_a_missing_file_is_explained_where_the_copy_is_to_blame(tmp_path, line, says):
    root = fill(tmp_path / "p", git=True)
    run = RunFolder(tmp_path / "run-1")
    run.create()
    code = with_left_out(find_code(root, runs_user_program=True))
    copy(code, run)
    (root / "later.txt").write_text("")
    at = {"code": run.code, "root": root}
    cause = explain(code, run.code, ["Traceback", line.format(**at), "  more"])
    assert cause is None if says is None else says.format(**at) in (cause or ""), cause
    assert explain(Code(kind="none"), run.code, [line]) is None


@pytest.mark.process
def test_a_run_says_both(home, capsys):
    Path("train.py").write_text("open('data/a.bin')")
    Path("data").mkdir()
    Path("data/a.bin").write_bytes(b"x" * 2048)
    Path(".gitignore").write_text("data\n")
    subprocess.run(["git", "init", "-q"], check=True)
    arguments = ["--snapshot", "backend.max_restarts=0", "--json", "--", sys.executable, "train.py"]
    code, out, err = orch(capsys, "submit", *arguments)
    err = " ".join(err.split())
    assert code == 0 and "leaves out data/ (2.00 KiB), which git ignores: --in-place" in err
    assert f"the copy of {Path.cwd()} has 2 files, 23 B" in err
    folder = RunFolder(Path(json.loads(out)["run_dir"]))
    wait_end(folder)
    cause = read_state(folder).cause
    assert cause and "data/a.bin is not in the copy of" in cause.tail[-1]
    assert "git ignores it; --in-place runs the program with it" in orch(
        capsys, "status", folder.run_id
    )[1].replace("\n", " ")
    code, out, _ = orch(
        capsys, "submit", "--snapshot", "--dry-run", "--", sys.executable, "train.py"
    )
    assert code == 0 and "leaves out data/ (2.00 KiB)" in " ".join(out.split())
