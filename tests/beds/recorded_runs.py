"""The run folders of tests/golden, copied to where a test wants them."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"


def write_text(home: Path) -> None:
    """The corpus of the run, the same on every machine: `data.paths` names it from the home, so no
    plan changes."""
    vocabulary = [
        "rank",
        "node",
        "plan",
        "step",
        "batch",
        "layer",
        "token",
        "state",
        "save",
        "load",
        "mesh",
        "ring",
    ]
    picks = [hashlib.sha256(bytes([line])).digest()[:9] for line in range(100)]
    (home / "text").mkdir()
    (home / "text" / "words.txt").write_text(
        "".join(" ".join(vocabulary[b % 12] for b in p) + "\n" for p in picks)
    )


def environment(home: Path) -> dict[str, str]:
    """No scheduler, and this interpreter's own packages."""
    return {
        "HOME": str(home),
        "ORCH_HOME": str(home / "orch"),
        "PATH": str(home / "bin"),
        "LANG": "C.UTF-8",
    } | {
        "KUBECONFIG": str(home / "kubeconfig"),
        "XDG_CACHE_HOME": str(home / "cache"),
    }


def restore(name: str, home: Path) -> Path:
    """A recorded folder in that home, private to its user, with this machine's paths and a key of
    its own."""
    folder = home / "orch" / "runs" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(GOLDEN / f"run_{name}", folder)
    for subfolder in ("logs", "events", "metrics", "checkpoints"):
        (folder / subfolder).mkdir(exist_ok=True)
    replacements = {
        "<PYTHON>.bin": str(Path(sys.executable).parent),
        "<PYTHON>": sys.executable,
        "<HOME>": str(home),
    }
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".yaml", ".log"):
            content = path.read_text()
            for name, value in replacements.items():
                content = content.replace(name, value)
            path.write_text(content)
    (folder / "secret.key").write_text(os.urandom(32).hex() + "\n")
    for path in (home / "orch").rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return folder
