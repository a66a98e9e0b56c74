"""The pages of docs/reference are what the code says today; and every link of every page leads
somewhere."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from orchestrator import __version__
from orchestrator.backends.kubernetes.objects.pod import pod_failure_policy
from orchestrator.backends.slurm.script.fixed import LIFECYCLE
from orchestrator.cli.verbs import VERBS
from orchestrator.cli.verbs.version import formats
from orchestrator.observe.events import BENCH_EVENTS, EVENTS
from orchestrator.plan.exits import MEANING, REACTIONS, Exit
from orchestrator.run.files import RUN_FILES, described
from orchestrator.run.state import CAUSES
from tests.docs.scripts import script
from tests.house.rooms import MODULES, ROOT

_LINK = re.compile(r"(?<!\\)\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")


def test_the_reference_is_current():
    new = script("make_reference").pages()
    disk = {path.name: path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert disk.keys() == new.keys()
    old = [name for name in new if disk[name] != new[name]]
    assert not old, f"{', '.join(old)}: python docs/make_reference.py"


def test_the_reference_names_every_verb_key_and_option():
    generated = script("make_reference").pages()
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


def test_nothing_of_the_reference_lacks_its_meaning():
    """Every key, option, argument, metric, event, code and file: the cell of its meaning."""
    empty = []
    for page, text in script("make_reference").pages().items():
        column = None
        for line in text.splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if "meaning" in cells:
                column = cells.index("meaning")
            elif not cells:
                column = None
            elif column is not None and (not cells[column] or cells[column].startswith("None:")):
                empty.append(f"{page}: {line}")
    assert empty == []


def written_events() -> dict[str, set[str]]:
    """Name -> fields of each event that a line of the code writes under its own name."""
    names: dict[str, set[str]] = {}
    sources = [*(ROOT / "orchestrator" / "agent").rglob("*.py"), *(ROOT / "trainer").rglob("*.py")]
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in ("event", "record_event", "_record_event", "remove"):
                continue
            texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            for name in (text for text in texts if isinstance(text, str)):
                fields = {keyword.arg for keyword in node.keywords if keyword.arg}
                names.setdefault(name, set()).update(fields - {"epoch"})
    return names


def test_every_event_is_described_with_its_fields():
    """Names that the code computes: those of `_explain`, of the workers' start, of orch bench."""
    computed = {"workers_started", "flush_started", "stopped"}
    written = written_events()
    assert len(written) > 40
    assert written.keys() | computed == EVENTS.keys()
    for name, fields in written.items():
        assert fields <= set(EVENTS[name].fields.split()), name
    bench = (ROOT / "trainer" / "bench" / "__main__.py").read_text()
    assert set(re.findall(r'"(bench_\w+)"', bench)) == BENCH_EVENTS


def test_reactions_are_those_of_the_job_script_and_of_the_pods_rules():
    assert REACTIONS.keys() == MEANING.keys() == set(Exit)
    cases = re.findall(r"^    ([\d|]+)\)", "\n".join(LIFECYCLE), re.M)
    requeued = {int(code) for case in cases for code in case.split("|")}
    rules = pod_failure_policy()["rules"]
    codes_by_action = {
        rule["action"]: set(rule["onExitCodes"]["values"])
        for rule in rules
        if "onExitCodes" in rule
    }
    for code, reaction in REACTIONS.items():
        assert reaction.slurm.startswith("the job is requeued") == (code in requeued), code
        fails = code in codes_by_action["FailJob"]
        assert reaction.kubernetes.startswith("the Job fails") == fails, code
        not_counted = code in codes_by_action["Ignore"]
        assert reaction.kubernetes.endswith("not counted") == not_counted, code


def test_the_guide_to_failures_has_every_code_and_every_cause():
    page = (ROOT / "docs" / "guides" / "failures.md").read_text()
    sections = {
        section.partition("\n")[0]: re.findall(r"^\| `?(\w+)`?.* \|", section, re.M)
        for section in page.split("\n## ")
    }
    codes = [int(row) for row in sections["By exit code"] if row.isdecimal()]
    assert set(map(int, Exit)) <= set(codes)
    assert sections["By first cause"] == ["cause", *CAUSES]


def test_files_of_recorded_runs_are_described():
    """Of each backend; tests/docs/test_shown.py and tests/slurm/test_guide.py compare those of
    runs of their own."""
    unknown = []
    for backend in ("local", "slurm", "kubernetes"):
        folder = ROOT / "tests" / "golden" / f"run_{backend}"
        names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        unknown += [name for name in names if not described(name)]
    assert unknown == ["cancel.json"], "a request as earlier versions wrote it"
    assert described("kubernetes/.placement.json.7.0a1b2c3d.tmp"), "its writer was killed"
    schemas = set(re.findall(r"`(orch\.\w+/\d+)`", " ".join(file.form for file in RUN_FILES)))
    assert schemas <= set(" ".join(formats().values()).split())


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
