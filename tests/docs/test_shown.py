"""What pages show is what a newcomer gets: the guides, README's lines, the notebook."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import takewhile
from pathlib import Path

import pytest

from orchestrator.cli.parser import make_parser
from orchestrator.cli.verbs import VERBS
from orchestrator.observe.events import EVENTS
from orchestrator.run.files import described
from tests.docs.shown import Command, File, matches, play, steps
from tests.house.rooms import ROOT

README = (ROOT / "README.md").read_text()


@pytest.fixture
def environ(tmp_path) -> dict[str, str]:
    """The environment of somebody who has just installed orch: a home of their own, and `orch` on
    PATH."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ORCH", "SLURM", "KUBE", "COLUMNS"))
    }
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    (tmp_path / "work").mkdir()
    return {**variables, "ORCH_HOME": str(tmp_path / "home"), "PATH": path, "OMP_NUM_THREADS": "1"}


def test_how_output_is_compared():
    page = "```console\n$ a\nx … z\n...\nlast\n$ b\n```\n```python file=c.py\npass\n```\n"
    assert list(steps(page)) == [
        Command("a", ["x … z", "...", "last"]),
        Command("b", []),
        File("c.py", "pass\n"),
    ]
    assert matches(["x 1 z", "last"], ["x … z", "...", "last"]) and matches(
        ["x  z", "1", "2", "last"], ["x … z", "...", "last"]
    )
    assert (
        not matches(["x 1 z"], ["x … z", "...", "last"])
        and not matches(["y"], [])
        and matches([], [])
    )
    assert not matches(["a.b"], ["acb"]) and not matches(["acb"], ["a.b"])


DOCS = ROOT / "docs"
GUIDES = [DOCS / "tutorial.md", *sorted((DOCS / "guides").glob("*.md"))]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_each_guide(guide, environ, tmp_path):
    """Its commands one by one on this machine, in a folder and a home of their own. The reference
    describes every file and every event that they leave."""
    play(guide.read_text(), tmp_path / "work", environ)
    runs = tmp_path / "home" / "runs"
    for path in (path for path in runs.rglob("*") if path.is_file()):
        name = "/".join(path.relative_to(runs).parts[1:])
        assert described(name), name
        if name.startswith("events/"):
            events = [json.loads(line)["name"] for line in path.read_text().splitlines()]
            assert set(events) <= EVENTS.keys()


@pytest.mark.process
def test_what_the_readme_shows(environ, tmp_path):
    play(README, tmp_path / "work", environ)


def suggested(page: str) -> Iterator[list[str]]:
    """The words of each command line of orch in blocks that no test plays."""
    for block in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S):
        for line in block.replace("\\\n", " ").replace(";", "\n").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["orch"]:
                yield words[1:]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_verbs_flags_and_keys_of_a_guide_exist(guide):
    """Of the command lines that need a cluster: the guides only suggest them."""
    reference = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    for verb, *words in suggested(guide.read_text()):
        parser = make_parser(verb, VERBS[verb])
        import_module(f"orchestrator.cli.verbs.{verb}").add_arguments(parser)
        flags = {flag for action in parser._actions for flag in action.option_strings}
        for word in takewhile(lambda word: word not in ("--", "train.py"), words):
            key, is_override, _ = word.partition("=")
            name = key.removeprefix("backend.options.").removeprefix("+")
            if word.startswith("-"):
                assert key in flags, f"orch {verb} {word}"
            elif is_override and "/" not in key:
                assert f"| `{name}` |" in reference, f"orch {verb} {word}"


def quickstarts() -> dict[str, list[str]]:
    """Title -> its lines, of the README."""
    section = README.partition("## Four ways in")[2].partition("\n## ")[0]
    blocks = re.findall(r"^\*\*(.+?)\*\*.*?^```sh\n(.*?)^```", section, re.M | re.S)
    return {
        title: [line.partition("  #")[0].strip() for line in body.splitlines()]
        for title, body in blocks
    }


def test_the_readme_s_order():
    """A sentence for who types torchrun, a picture, two commands and pip install on the first
    screen, four quickstarts of three lines."""
    order = [
        "**Type `orch run train.py` where you type `torchrun train.py`",
        "docs/plan.svg",
        "make demo",
        "make test",
        "pip install .",
        "## Four ways in",
        "## Compared with other tools",
    ]
    order += ["## What it cannot do", "## Links"]
    at = [README.index(phrase) for phrase in order]
    assert at == sorted(at)
    first_screen = README.splitlines()[:22]
    commands = [line for line in first_screen if re.match(r"(make|pip|git|curl|conda|orch) ", line)]
    assert [line.split("#")[0].strip() for line in commands] == ["make demo", "make test"]
    assert any("pip install ." in line for line in first_screen)
    lines_by_title = quickstarts()
    assert len(lines_by_title) == 4 and {len(lines) for lines in lines_by_title.values()} == {3}
    assert max(len(line) for line in README.splitlines() if line.startswith("|")) <= 120


def test_cluster_has_one_spelling():
    """README and the help explain `+cluster=` once; everywhere else it is `cluster=`."""
    pages = [
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("docs/*.ipynb"),
        *ROOT.glob("slurm/*.md"),
        *ROOT.glob("charts/**/*.md"),
        *ROOT.glob("orchestrator/**/*.py"),
        *ROOT.glob("trainer/**/*.py"),
        ROOT / "README.md",
    ]
    counts = {path.relative_to(ROOT): path.read_text().count("+cluster=") for path in pages}
    assert {str(path): count for path, count in counts.items() if count} == {
        "README.md": 2,  # the explanation, and its line
        "docs/reference/verbs.md": 1,  # the help
        "orchestrator/cli/main.py": 1,
    }


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("title", quickstarts())
def test_each_quickstart_runs(title, environ, tmp_path):
    """Its lines one by one; what needs a cluster runs as `--dry-run`, on the described one. Of the
    laptop's three hundred steps five are made: those that follow run the same code."""
    work = tmp_path / "work"
    (work / "train.py").write_text(
        "import os\nprint('hello from', os.environ['RANK'], flush=True)\n"
    )
    for line in quickstarts()[title]:
        argv = shlex.split(line)
        if "cluster=slurm" in argv or "cluster=kubernetes" in argv:
            argv = ["cluster=h100x64" if arg.startswith("cluster=") else arg for arg in argv]
            argv = ["--dry-run" if arg == "--follow" else arg for arg in argv]
        argv = [arg.replace("REGISTRY", "registry.example") for arg in argv]
        if argv[:2] == ["orch", "submit"] and "cluster=local" in argv:
            argv.append("train.steps=5")
        done = subprocess.run(
            argv, cwd=work, env=environ, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip(), line


@pytest.mark.process
@pytest.mark.slow
def test_the_notebook(environ, tmp_path):
    """Its cells in order, in one process, as a kernel runs them."""
    book = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())
    assert book["nbformat"] == 4
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5
    code = (
        "import sys\nfor cell in sys.stdin.read().split('\\0'):\n    exec(compile(cell, 'cell',"
        " 'exec'), globals())\n"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(
        argv,
        cwd=tmp_path / "work",
        env=environ,
        input="\0".join(cells),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "65" in done.stdout and "cancelled" in done.stdout and "rank 0 step" in done.stdout
