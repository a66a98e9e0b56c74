"""A program of two files travels into pods on two real nodes: stored once, deleted with its last
run, the same on a resume, refused if damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.plan import Exit
from tests.beds.kubernetes.runs import Orch, Run

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow]

#: It ends once a file is on the claim, so that what a test does to it comes before its end.
TRAIN = """
import os, time
from library import neighbour
print(neighbour.WORD, "in", os.getcwd(), os.listdir("."), flush=True)
while not os.path.exists("/orch/runs/go"):
    time.sleep(0.2)
"""
TWO_PODS = ("cluster=local", "cluster.nodes=2", "cluster.gpus_per_node=1", "parallel=dp2")
SELECTOR = "orch.dev/code"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    folder = tmp_path / "program"
    (folder / "library").mkdir(parents=True)
    (folder / "train.py").write_text(TRAIN)
    (folder / "library" / "neighbour.py").write_text("WORD = 'as submitted'")
    (folder / "data.bin").write_bytes(b"x" * 5000)
    (folder / ".orchignore").write_text("*.bin\n")
    return folder


def sent(orch: Orch, program: Path, verb: str, *flags: str, code: int = 0):
    """The answer of `orch submit` or `orch render` in the program's folder."""
    words = [word for word in orch.submission()[1:] if word != "--in-place"]
    argv = (verb, *words, *TWO_PODS, *flags, "--", "python3", "train.py")
    return orch(*argv, cwd=program, code=code)


def stored(orch: Orch) -> list[dict]:
    """The ConfigMaps that hold programs."""
    return orch.bed.get("configmaps", "-n", orch.namespace, "-l", SELECTOR)["items"]


def test_two_runs_share_what_is_stored_and_the_last_takes_it_along(orch, program):
    done = sent(orch, program, "submit")
    messages = " ".join(done.stderr.split())
    assert "the copy of" in messages and "has 3 files" in messages
    assert "leaves out data.bin (4.88 KiB), by .orchignore" in messages
    first = Run(orch, json.loads(done.stdout)["run_dir"])
    [chunk] = stored(orch)
    second = Run(orch, json.loads(sent(orch, program, "submit", "--snapshot").stdout)["run_dir"])
    [same] = stored(orch)
    assert same["metadata"]["uid"] == chunk["metadata"]["uid"]
    owners = {owner["name"] for owner in same["metadata"]["ownerReferences"]}
    assert owners == {first.id, second.id}

    second.until("its start", lambda: second.state().state == "running")
    orch("cancel", second.id)
    (program / "library" / "neighbour.py").write_text("WORD = 'changed later'")
    orch("resume", second.id, cwd=program)
    (orch.claim / "go").touch()
    for run in (first, second):
        run.wait("done")
        for rank in ("0", "1"):
            printed = orch("logs", run.id, "--rank", rank).stdout
            assert f"as submitted in /orch/code/{run.id} " in printed
            assert "'train.py'" in printed and "data.bin" not in printed

    orch.bed.kubectl("delete", "job", "-n", orch.namespace, first.id, timeout=120)
    orch.bed.wait(lambda: _owners(orch) == {second.id}, 120, "one owner fewer")
    orch.bed.kubectl("delete", "job", "-n", orch.namespace, second.id, timeout=120)
    orch.bed.wait(lambda: not stored(orch), 120, "the end of the stored program")


def _owners(orch: Orch) -> set[str]:
    [chunk] = stored(orch)
    return {owner["name"] for owner in chunk["metadata"]["ownerReferences"]}


def test_a_damaged_program_is_refused_by_the_submission_and_by_the_pods(orch, program):
    """What a repository applies is not checked by a submission."""
    rendered = sent(orch, program, "render", "--json")
    script = json.loads(rendered.stdout)["script"]
    run = Run(orch, json.loads(rendered.stdout)["run_dir"])
    [line] = [line for line in script.splitlines() if line.startswith("  code.000: ")]
    damaged = line[:-24] + ("A" * 20 if "A" * 20 not in line else "B" * 20) + line[-4:]
    argv = ("apply", "-n", orch.namespace, "-f", "-")
    orch.bed.kubectl(*argv, input=script.replace(line, damaged), timeout=120)
    done = sent(orch, program, "submit", code=Exit.SECURITY)
    assert "does not hold the code that its name promises: delete it" in done.stderr
    run.wait("failed")
    state = run.state()
    assert state.exit_code == Exit.SECURITY
    assert "was submitted: delete its ConfigMaps" in (state.reason or "")
