"""`python -m tests.golden.record`: the run folders that the tests of old records read, made with the code at hand.

They were made at commit e2cf075 and are to stay: a run folder that somebody has is not written anew either. One is a
real run on this machine that was cancelled. There is no scheduler here: the other two are what `orch render` writes, of
the same job, with the events, metrics and logs of the real run and its state while it ran.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
HOME, PYTHON = "<HOME>", "<PYTHON>"
SECRET = "secret.key"  # drawn anew by whoever copies a folder
_LEFT_OUT = {SECRET, "run.lock", ".lock"}
JOB = [
    *("cluster=local", "cluster.nodes=2", "cluster.gpus_per_node=1", "parallel=dp2_zero1"),
    *("model.layers=1", "model.hidden=8", "model.heads=2", "model.kv_heads=1", "model.ffn_hidden=16"),
    *("model.tied_embeddings=true", "train.seq_len=32", "train.global_batch_samples=4", "train.steps=300"),
    *("checkpoint.every_steps=10", "checkpoint.keep_last=1", "metrics.trace_steps=0"),
    *("data=text", "data.paths=['~/text']", "data.cache_dir=~/tokens"),
]


def write_text(home: Path) -> None:
    """The corpus of the run, the same on every machine: `data.paths` names it from the home, so no plan changes."""
    words = ["rank", "node", "plan", "step", "batch", "layer", "token", "state", "save", "load", "mesh", "ring"]
    picks = [hashlib.sha256(bytes([line])).digest()[:9] for line in range(100)]
    (home / "text").mkdir()
    (home / "text" / "words.txt").write_text("".join(" ".join(words[b % 12] for b in p) + "\n" for p in picks))


def environment(home: Path) -> dict[str, str]:
    """No scheduler, and this interpreter's own packages."""
    return {"HOME": str(home), "ORCH_HOME": str(home / "orch"), "PATH": str(home / "bin"), "LANG": "C.UTF-8"} | {
        "KUBECONFIG": str(home / "kubeconfig"),
        "XDG_CACHE_HOME": str(home / "cache"),
    }


def restore(name: str, home: Path) -> Path:
    """A recorded folder in that home, private to its user, with this machine's paths and a key of its own."""
    folder = home / "orch" / "runs" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(HERE / f"run_{name}", folder)
    for part in ("logs", "events", "metrics", "checkpoints"):
        (folder / part).mkdir(exist_ok=True)
    _replace(folder, {HOME: str(home), PYTHON: sys.executable, f"{PYTHON}.bin": str(Path(sys.executable).parent)})
    (folder / SECRET).write_text(os.urandom(32).hex() + "\n")
    for path in (home / "orch").rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return folder


def _replace(folder: Path, names: dict[str, str]) -> None:
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".yaml", ".log"):
            text = path.read_text()
            for name in sorted(names, key=len, reverse=True):
                text = text.replace(name, names[name])
            path.write_text(text)


def _keep(folder: Path, home: Path) -> None:
    target = HERE / f"run_{folder.name}"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target, ignore=lambda _, names: _LEFT_OUT & set(names))
    for older in sorted(target.glob("checkpoints/step-*"))[:-1]:
        shutil.rmtree(older)  # the last one is enough to go on from, and these files are tracked
    _replace(target, {str(home): HOME, sys.executable: PYTHON, str(Path(sys.executable).parent): f"{PYTHON}.bin"})


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        write_text(home)

        def orch(*words: str) -> str:
            argv = [sys.executable, "-m", "orchestrator.cli.main", *words]
            found = subprocess.run(argv, env=environment(home), cwd=home, capture_output=True, text=True, check=True)
            return found.stdout

        runs = home / "orch" / "runs"
        orch("submit", "--run-id", "local", *JOB)
        while not list((runs / "local" / "checkpoints").glob("step-*/manifest.json")):
            time.sleep(0.01)
        running = json.loads((runs / "local" / "state.json").read_text())
        assert running["state"] == "running"
        orch("cancel", "local")
        while json.loads(orch("status", "--json", "local"))["state"]["state"] != "cancelled":
            time.sleep(0.2)
        orch("render", "--run-id", "slurm", *JOB, "backend=slurm", "backend.options.topology=none")
        orch("render", "--run-id", "kubernetes", *JOB, "backend=kubernetes", "backend.options.image=orch:1")
        slurm = {"job_id": "4711", "submitted_at": running["created_at"], "life": 0}
        for backend, record in (("slurm", slurm), ("kubernetes", {"namespace": "default", "sent": True})):
            folder = runs / backend
            for part in ("events", "metrics", "logs"):
                shutil.copytree(runs / "local" / part, folder / part, dirs_exist_ok=True)
            for file in folder.glob("metrics/*"):
                file.write_text("".join(file.read_text().splitlines(keepends=True)[:10]))
            own = json.loads((folder / "state.json").read_text())
            own = {key: own[key] for key in ("run_id", "backend", "plan_hash")}
            (folder / "state.json").write_text(json.dumps(running | own, indent=1))
            if (folder / "backend.json").exists():
                record = json.loads((folder / "backend.json").read_text()) | record
            (folder / "backend.json").write_text(json.dumps(record))
        for folder in runs.iterdir():
            _keep(folder, home)


if __name__ == "__main__":
    main()
