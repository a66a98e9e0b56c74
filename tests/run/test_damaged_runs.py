"""Any bytes in any file of a run folder: `list` and `status` say what is wrong with it, and show
the others as ever."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.plan.exits import Exit
from tests.beds.recorded_runs import environment, restore
from tests.golden.lines import orch

RUNS = ("local", "slurm", "kubernetes")  # written by their own backends; no scheduler is in reach
_LIMIT_S = 60
VALUES = [None, True, -1, 10**30, 1e308, -(2**63), "", "x\x1b[2J\n", [], {}, [[]], {"a": 1}]
ODD = [
    b"",
    b"null",
    b"{",
    b"[" * 200_000,
    b'{"\xed":1}',
    b'{"a":' * 100_000,
    b"1e999",
    b"\x00" * 64,
    b"\xff\xfe",
]
KINDS = ("folder", "dangling link", "fifo")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    before = dict(os.environ)
    home = tmp_path_factory.mktemp("home")
    os.environ.clear()
    os.environ |= environment(home)
    for name in RUNS:
        restore(name, home)
    yield home
    os.environ.clear()
    os.environ |= before


def files(folder: Path) -> list[Path]:
    """All that anything reads of a run: not its copy of the code, nor its checkpoints."""
    skip = ("code", "checkpoints")
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in paths if path.relative_to(folder).parts[0] not in skip] + [
        folder / "run.lock"
    ]


def mutated(draw, raw: bytes) -> bytes:
    """The JSON document, or one line of it, with one of its values replaced."""
    lines = raw.splitlines() if raw.count(b"}\n{") else [raw]
    index = draw(st.integers(0, len(lines) - 1))
    try:
        document = copy.deepcopy(json.loads(lines[index]))
    except ValueError:
        return raw[: len(raw) // 2]
    inside = document
    while isinstance(inside, dict | list) and inside:
        keys = list(inside) if isinstance(inside, dict) else range(len(inside))
        key = draw(st.sampled_from(list(keys)))
        if not isinstance(inside[key], dict | list) or not inside[key] or draw(st.booleans()):
            inside[key] = draw(st.sampled_from(VALUES))
            break
        inside = inside[key]
    lines[index] = json.dumps(document).encode()
    return b"\n".join(lines) + b"\n"


def damage(draw, path: Path) -> None:
    raw = path.read_bytes() if path.exists() else b""
    damage_kind = draw(st.sampled_from(("bytes", "cut", "value", "odd", *KINDS)))
    path.unlink(missing_ok=True)
    if damage_kind == "folder":
        path.mkdir()
    elif damage_kind == "dangling link":
        path.symlink_to("nowhere")
    elif damage_kind == "fifo":
        os.mkfifo(path)
    elif damage_kind == "bytes":
        path.write_bytes(draw(st.binary(max_size=200)))
    elif damage_kind == "cut":
        path.write_bytes(raw[: draw(st.integers(0, len(raw)))])
    elif damage_kind == "odd":
        path.write_bytes(draw(st.sampled_from(ODD)))
    else:
        path.write_bytes(mutated(draw, raw) if raw else b"")


def listed() -> tuple[dict[str, str], dict[str, str]]:
    """Run -> state, and run -> why it cannot be read."""
    listing = orch(["list", "--json"])
    assert listing.exit == 0, listing.err
    rows = json.loads(listing.out)
    assert len(rows) == len(RUNS)
    return (
        {row["state"]["run_id"]: row["state"]["state"] for row in rows if "state" in row},
        {row["run_id"]: row["unreadable"] for row in rows if "unreadable" in row},
    )


@pytest.mark.parametrize("name", RUNS)
@given(st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_one_damaged_run_ends_no_verb_for_the_others(home, name, data):
    folder = home / "orch" / "runs" / name
    states_before, _ = listed()
    backup = home / "kept"
    shutil.copytree(folder, backup, symlinks=True)
    stands_on = [
        folder / file_name
        for file_name in ("state.json", "backend.json", "request.json", "run.lock")
    ]
    path = data.draw(st.sampled_from([*files(folder), *stands_on * 4]))
    signal.alarm(_LIMIT_S)  # what waits for ever ends the test
    try:
        damage(data.draw, path)
        states, unreadable = listed()
        other_runs = set(RUNS) - {name}
        assert {other_run: states[other_run] for other_run in other_runs} == {
            other_run: states_before[other_run] for other_run in other_runs
        }
        assert set(unreadable) <= {name} and all(unreadable.values())
        page = orch(["list"])
        assert page.exit == 0 and all(other_run in page.out for other_run in other_runs)
        assert not unreadable or f"{name}  unreadable: {unreadable[name]}" in page.out
        status = orch(["status", name])
        if unreadable:
            assert status.exit in (Exit.CONFIG, Exit.USAGE) and len(status.err.splitlines()) == 1
        else:
            assert status.exit == 0, status.err
    finally:
        signal.alarm(0)
        shutil.rmtree(folder)
        backup.rename(folder)
