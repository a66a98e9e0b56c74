"""The user's memory of bad nodes: it expires, it can be told to forget, and nothing that happens to
it is an error."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from orchestrator.backends.slurm.backend import SlurmBackend
from orchestrator.backends.slurm.record import exclude
from orchestrator.cli.main import main
from orchestrator.plan.exits import Exit
from orchestrator.run import bad_nodes
from orchestrator.run.bad_nodes import BadNode, NodeMemory
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import finish, read_state


def bad(node: str, at: float = 1000.0, hours: float = 1.0, cluster: str = "c") -> BadNode:
    return BadNode(
        cluster=cluster, node=node, why="it fell over", run="r1", at=at, until=at + 3600 * hours
    )


@pytest.fixture
def memory(tmp_path) -> NodeMemory:
    return NodeMemory(tmp_path / "home")


def test_what_is_added_is_there_until_it_expires(memory):
    assert memory.read(0) == []
    memory.add(bad("n1"))
    memory.add(bad("n2", at=2000, hours=2, cluster="d"))
    memory.add(bad("n1", at=1500))  # again: for longer
    assert [(row.node, row.at) for row in memory.read(2000)] == [("n1", 1500), ("n2", 2000)]
    assert [row.node for row in memory.read(2000, "d")] == ["n2"]
    assert [row.node for row in memory.read(1500 + 3600)] == ["n2"] and memory.read(1e9) == []
    assert (
        oct(memory.file.stat().st_mode & 0o777) == "0o600"
        and oct(memory.file.parent.stat().st_mode)[-3:] == "700"
    )


def test_runs_that_end_together_lose_nothing(memory):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: memory.add(bad(f"n{number}")), range(40)))
    assert {row.node for row in memory.read(1000)} == {f"n{number}" for number in range(40)}


def test_who_is_stopped_while_it_writes_keeps_nobody_waiting(memory, monkeypatch):
    memory.add(bad("n1"))
    monkeypatch.setattr(bad_nodes, "_LOCK_S", 0.2)
    with memory._locked(), pytest.raises(OSError):
        NodeMemory(memory.file.parent).add(bad("n2"))
    memory.add(bad("n3"))
    assert [row.node for row in memory.read(1000)] == ["n1", "n3"]


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'{"schema":"orch.nodes/9","nodes":[]}', b"\xff\xfe", b"[" * 9999]
)
def test_a_damaged_file_is_an_empty_one(memory, raw):
    memory.add(bad("n1"))
    memory.file.write_bytes(raw)
    assert memory.read(1000) == []
    memory.add(bad("n2"))
    assert [row.node for row in memory.read(1000)] == ["n2"]


def test_the_verb_shows_and_forgets(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    memory = NodeMemory(tmp_path / "home")
    now = time.time()
    assert main(["nodes"]) == 0 and capsys.readouterr().out == "no node is left out\n"
    for node, cluster in (("n1", "c"), ("n2", "c"), ("n3", "d")):
        memory.add(bad(node, at=now, cluster=cluster))
    assert main(["nodes", "--cluster", "c"]) == 0
    page = capsys.readouterr().out
    assert "n1" in page and "n3" not in page and "it fell over" in page and "r1" in page
    assert main(["nodes", "--forget", "n"]) == Exit.USAGE
    assert "no node 'n' is on the list of bad nodes" in capsys.readouterr().err
    assert main(["nodes", "--forget", "n1", "--json"]) == 0
    assert [row["node"] for row in json.loads(capsys.readouterr().out)["nodes"]] == ["n2", "n3"]
    assert main(["nodes", "--forget-all", "--cluster", "d"]) == 0
    assert [row.node for row in memory.read(now)] == ["n2"]


def test_a_submission_to_slurm_leaves_them_out_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    arguments = ["submit", "--dry-run", "--json", "--in-place", "backend.options.exclude=[n7]"]
    arguments += ["backend=slurm", "cluster=h100x64", "model=llama3_70b", "parallel=tp8_pp4"]
    NodeMemory(tmp_path / "home").add(bad("n5", at=time.time(), cluster="h100x64"))
    NodeMemory(tmp_path / "home").add(bad("n6", at=time.time(), cluster="elsewhere"))
    assert main(arguments) == 0
    seen = capsys.readouterr()
    options = json.loads(seen.out)["backend_options"]
    assert (options["exclude"], options["bad_nodes"]) == (["n7"], ["n5"])
    assert "orch: without n5, found bad by earlier runs (orch nodes)" in seen.err


def test_a_resume_on_slurm_leaves_out_those_of_its_day_and_the_users_own(
    tmp_path, monkeypatch, capsys
):
    """Not those of the day of its submission, which may have been forgotten since."""
    home = tmp_path / "home"
    sent = []
    monkeypatch.setenv("ORCH_HOME", str(home))
    monkeypatch.setattr(SlurmBackend, "_find_job", lambda *_: None)
    monkeypatch.setattr(
        SlurmBackend,
        "state",
        lambda _, folder: finish(read_state(folder), "failed", 1, "it failed"),
    )
    monkeypatch.setattr(SlurmBackend, "_send", lambda _, folder, body, environ: sent.append(body))
    memory = NodeMemory(home)
    memory.add(bad("n5", at=time.time(), cluster="h100x64"))
    job = [
        "backend.options.exclude=[n7]",
        "backend.options.topology=none",
        "cluster=h100x64",
        "parallel=tp8",
    ]
    assert (
        main(["render", "--run-id", "r", "--in-place", "backend=slurm", *job, "--", "/bin/true"])
        == 0
    )
    assert "#SBATCH --exclude=n[5,7]\n" in capsys.readouterr().out
    folder = RunFolder(home / "runs" / "r")
    for forgotten, bad_node, left_out in (("n5", "n8", "n[7-8]"), ("n8", "n9", "n[7,9]")):
        assert main(["nodes", "--forget", forgotten]) == 0
        memory.add(bad(bad_node, at=time.time(), cluster="h100x64"))
        assert main(["resume", "r"]) == 0
        assert (
            f"orch: without {bad_node}, found bad by earlier runs (orch nodes)"
            in capsys.readouterr().err
        )
        assert (
            f"#SBATCH --exclude={left_out}\n" in sent[-1]
            and f"\nexcluded_nodes='{left_out}'\n" in sent[-1]
        )
    (folder.path / "slurm").mkdir()
    exclude(folder, ["n1"])  # while it runs
    assert (folder.path / "slurm" / "exclude").read_text() == "n[1,7,9]\n"
    assert main(["nodes", "--forget-all"]) == 0
    assert main(["resume", "r"]) == 0
    assert "#SBATCH --exclude=n7\n" in sent[-1] and "orch: without" not in capsys.readouterr().err
