"""The pages of docs/reference are what the code says today; and every link of every page leads
somewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from orchestrator import __version__
from orchestrator.cli.verbs import VERBS
from orchestrator.cli.verbs.version import formats
from tests.house.rooms import MODULES, ROOT

_LINK = re.compile(r"(?<!\\)\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")


def generator():
    spec = importlib.util.spec_from_file_location(
        "make_reference", ROOT / "docs" / "make_reference.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_current():
    new = generator().pages()
    disk = {path.name: path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert disk.keys() == new.keys()
    old = [name for name in new if disk[name] != new[name]]
    assert not old, f"{', '.join(old)}: python docs/make_reference.py"


def test_the_reference_names_every_verb_key_and_option():
    generated = generator().pages()
    for verb in VERBS:
        assert f"## orch {verb}\n" in generated["verbs.md"]
    for key in (
        "train.seq_len",
        "parallel.schedule",
        "backend.max_restarts",
        "metrics.pattern",
        "optim.lr",
    ):
        assert f"| `{key}` |" in generated["configuration.md"], key
    for option in ("partition", "ssh", "queue", "rdma"):
        assert f"| `{option}` |" in generated["options.md"], option
    for name in ("orch.plan", "Run.logs", "orch.StepUpdate", "orch_report.report"):
        assert f"`{name}`" in generated["python.md"], name


def pages() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    page_names = listed.stdout.split() if listed.returncode == 0 else []
    if not page_names:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in page_names]


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    heads = re.findall(r"^#+\s+(.*)$", prose, flags=re.M)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


def test_every_link_leads_somewhere():
    lost = []
    for page in pages():
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
        for target in _LINK.findall(prose):
            if re.match(r"[a-z]+:", target):
                continue  # elsewhere: nothing of ours
            path, _, anchor = target.partition("#")
            where = (page.parent / path).resolve() if path else page
            if not where.exists() or (
                anchor and where.suffix == ".md" and anchor not in anchors(where)
            ):
                lost.append(f"{page.relative_to(ROOT)}: {target}")
    assert lost == []


def test_every_page_is_reached_from_the_index():
    """docs/index.md has Guides, Reference and Design, and in them every page."""
    index = (ROOT / "docs" / "index.md").read_text()
    heads = re.findall(r"^:caption: (.*)$", index, flags=re.M)
    assert heads == ["Guides", "Reference", "Design"]
    listed = set(re.findall(r"^(?:.*<)?([a-z_/-]+)>?$", index, flags=re.M))
    there = {
        str(path.relative_to(ROOT / "docs").with_suffix(""))
        for path in pages()
        if path.is_relative_to(ROOT / "docs") and path.name != "index.md"
    }
    assert there - listed == set()


def test_one_version_and_a_changelog_by_version():
    log = (ROOT / "CHANGELOG.md").read_text()
    heads = re.findall(r"^## (.*)$", log, flags=re.M)
    assert heads[0] == f"Unreleased ({__version__.partition('.dev')[0]})", (
        "the version under way is the first"
    )
    for head in heads[1:]:
        assert re.fullmatch(r"\d+\.\d+\.\d+", head)
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert "`vMAJOR.MINOR.PATCH`" in contributing


#: Names of the same form that begin the input of a hash: they are in no file.
HASHED = {"orch.order/1", "orch.random/1"}


def test_version_says_every_format_of_the_source():
    named = {
        name
        for path in MODULES.values()
        for name in re.findall(r"\borch\.[a-z]+/\d+", path.read_text())
    }
    assert named - HASHED == {name for name in formats().values() if re.search(r"/\d+$", name)}
