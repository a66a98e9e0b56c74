"""Private folders, atomic files, names that stay where they belong, and the lock that tells who
lives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run.folder import (
    RUN_ID,
    RunFolder,
    check_run_id,
    file_name,
    make_private_folder,
    new_run_id,
    read_secret,
    write_private,
)
from orchestrator.run.registry import all_runs, find_run, register
from tests.beds.bundles import refusal


def made(tmp_path, name="run-1") -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / name)
    folder.create()
    write_private(folder.request, b"{}")
    return folder


@given(st.text(max_size=200), st.text(max_size=200))
def test_file_names_stay_in_their_folder_and_never_meet(a, b):
    names = file_name(a), file_name(b)
    for name in names:
        assert (
            "/" not in name
            and "\0" not in name
            and name not in ("", ".", "..")
            and not name.startswith(".")
        )
        assert len(name.encode()) < 200 and name.isascii() and name.isprintable()
    assert (names[0] == names[1]) == (a == b)


@given(st.text(max_size=100), st.floats(0, 4e9))
def test_run_ids_are_dns_labels_whatever_the_name(name, now):
    assert RUN_ID.fullmatch(new_run_id(name, now))


@pytest.mark.parametrize(
    "bad",
    ["", "A", "a_b", "-a", "a-", "a" * 64, "../x", "a/b", "a\n", "a\nb", "$(id)", "ü", "a b", "."],
)
def test_bad_run_ids_are_refused(bad):
    with pytest.raises(OrchError) as refused:
        check_run_id(bad)
    assert refused.value.exit == 64 and "\n" not in refused.value.message


def test_a_replaced_file_is_whole_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "state.json"
    write_private(path, b"old" * 1000)
    write_private(path, b"new")
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    write_private(path, b"old")
    monkeypatch.setattr(
        os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space"):
        write_private(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_link_in_the_place_of_a_file_is_replaced_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "state.json").symlink_to(victim)
    write_private(tmp_path / "state.json", b"new")
    assert victim.read_text() == "precious" and not (tmp_path / "state.json").is_symlink()


def test_a_home_that_others_may_write_to_is_refused(tmp_path):
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o700)
    open_folder.chmod(0o777)
    with pytest.raises(OrchError, match="writable by others") as refused:
        make_private_folder(open_folder / "runs" / "x")
    assert refused.value.exit == 78
    open_folder.chmod(0o1777)  # as /tmp: others cannot rename what is ours
    make_private_folder(open_folder / "runs" / "x")


def test_one_run_one_folder(tmp_path):
    folder = made(tmp_path)
    with pytest.raises(OrchError, match="exists already"):
        folder.create()


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda p: p.chmod(0o644), "0600"),
        (lambda p: p.write_text("zz" * 32), "32-byte"),
        (lambda p: p.write_text("ab" * 31), "32-byte"),
        (lambda p: (p.unlink(), p.symlink_to("/dev/zero")), "cannot read"),
        (lambda p: p.unlink(), "cannot read"),
    ],
)
def test_a_key_that_cannot_be_trusted(tmp_path, spoil, complaint):
    path = tmp_path / "secret.key"
    write_private(path, b"ab" * 32 + b"\n")
    assert read_secret(path) == b"\xab" * 32
    spoil(path)
    with pytest.raises(OrchError, match=complaint) as refused:
        read_secret(path)
    assert refused.value.exit == 78


@pytest.mark.process
def test_the_lock_lives_as_long_as_any_process_that_inherited_it(tmp_path):
    folder = made(tmp_path)
    assert not folder.is_alive()
    lock = folder.take_lock()
    assert folder.take_lock(wait_s=0) is None
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock]
    )
    os.close(lock)
    assert folder.is_alive()
    child.kill()
    child.wait()
    assert not folder.is_alive()


def test_runs_are_found_by_handle_id_and_prefix(tmp_path):
    older_run = made(tmp_path, "tiny-1")
    newer_run = made(tmp_path, "tiny-22")
    os.utime(older_run.request, (1, 1))
    assert [run.run_id for run in all_runs(tmp_path)] == ["tiny-22", "tiny-1"]
    assert find_run(tmp_path, None) == newer_run
    for name in ("tiny-1", "local://tiny-1"):
        assert find_run(tmp_path, name) == older_run
    assert find_run(tmp_path, "tiny-2") == newer_run
    with pytest.raises(OrchError, match="begins 2 runs: tiny-22, tiny-1"):
        find_run(tmp_path, "tiny")
    with pytest.raises(OrchError, match="did you mean 'tiny-1'"):
        find_run(tmp_path, "tinny-1")


@pytest.mark.parametrize(
    "name", ["../../etc", "/etc/passwd", "..", ".", "", "\0", "local://../x", "*", "local://"]
)
def test_a_name_is_never_a_path(tmp_path, name):
    made(tmp_path)
    (tmp_path / "x").mkdir()
    with pytest.raises(OrchError) as refused:
        find_run(tmp_path, name)
    assert refused.value.exit == 64


def test_a_run_elsewhere_is_found_by_its_id(tmp_path):
    folder = made(tmp_path / "elsewhere")
    register(tmp_path / "home", folder)
    assert find_run(tmp_path / "home", "run-1").path.resolve() == folder.path


def test_no_runs_is_one_line(tmp_path):
    with pytest.raises(OrchError, match="there are no runs in"):
        find_run(tmp_path, None)


def test_a_place_without_rights_is_one_line(tmp_path, monkeypatch):
    with refusal("cannot make folder /proc/tiny", Exit.CONFIG):  # not even root may
        RunFolder(Path("/proc/tiny")).create()

    def denied(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", denied)
    with refusal("no permission to read", Exit.CONFIG):
        RunFolder(tmp_path / "closed" / "runs" / "tiny").create()
