"""The mutation run: its sites, its trees, and mutants of the trainer, which must be noticed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.mutations.judge import BY_TEST, LIVES, ODD, UNSEEN, Result, chosen
from tests.mutations.reach import ROOT
from tests.mutations.run import SUBJECTS, every_site, page, sample
from tests.mutations.sites import mutated, sites
from tests.patience import PATIENCE_S

SOURCE = '''
def f(a: int = 1, *rest) -> int:
    """A docstring of 3."""
    if a < 2:
        raise ValueError(f"{a + 1}")
    total = sorted(rest)[0] * 3
    total += g("tp", a)
    h(total)
    return -total
'''


def after(number: int) -> str:
    return ast.unparse(mutated(SOURCE, number))


def test_every_kind_of_site_is_found_and_changed():
    mutated_sources = {
        site.what.split(" in `")[0]: after(site.number) for site in sites("x.py", SOURCE)
    }
    assert (
        "if a <= 2" in mutated_sources["comparison Lt"]
        and "if not a < 2" in mutated_sources["condition negated"]
    )
    assert (
        "list(rest)[0]" in mutated_sources["sorted left out"]
        and "[0] + 3" in mutated_sources["operator Mult"]
    )
    assert (
        "g('cp', a)" in mutated_sources["group 'tp'"]
        and "g(a, 'tp')" in mutated_sources["first two arguments swapped"]
    )
    assert (
        "h(total)" not in mutated_sources["statement removed"]
        and "return +total" in mutated_sources["sign"]
    )
    assert "a: int=0" in mutated_sources["constant 1"] and "* 4" in mutated_sources["constant 3"]


def test_messages_and_docstrings_are_left_alone():
    assert all(
        'f"{' not in site.what and "docstring" not in site.what for site in sites("x.py", SOURCE)
    )
    trees = {after(site.number) for site in sites("x.py", SOURCE)}
    assert len(trees) == len(sites("x.py", SOURCE)) and ast.unparse(ast.parse(SOURCE)) not in trees


def test_a_site_knows_its_statement():
    spans = {
        site.line: (site.first, site.last)
        for site in sites("x.py", "if a(\n    1,\n):\n    b(\n        2)\n")
    }
    assert spans[2] == (1, 3) and spans[5] == (4, 5)


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_subject_has_sites(name):
    subject = SUBJECTS[name]
    subject_sites = every_site(subject)
    assert len(subject_sites) > 2000 and len({site.path for site in subject_sites}) > 40
    assert sample(subject, 5, 3) == sample(subject, 5, 3) != sample(subject, 5, 4)
    for site in subject_sites[::97]:
        compile(mutated((ROOT / site.path).read_text(), site.number), site.path, "exec")
    assert all((ROOT / room).is_dir() for room in subject.tests)


def test_quick_tests_of_all_files_are_asked_in_turn():
    seconds = {"a::1": 0.1, "a::2": 0.2, "a::3": 9.0, "b::1": 0.3, "c::1": 50.0}
    assert chosen(seconds, 4.0) == ["a::1", "b::1"]
    assert chosen(seconds, 60.0) == ["a::1", "b::1", "c::1", "a::2"]
    assert chosen({"c::1": 50.0}, 4.0) == ["c::1"], "one at least"


def test_the_page_counts():
    first, second, third, fourth = sample(SUBJECTS["trainer"], 4, 1)
    results = [
        Result(first, BY_TEST, "t", 1.0),
        Result(second, LIVES, "", 1.0),
        Result(third, ODD, "", 1.0),
    ]
    page_text = page(
        {"trainer": [*results, Result(fourth, LIVES, UNSEEN, 0.0)]}, {"trainer": 4000}, 1
    )
    assert "1 of 3 noticed (33.3 %)" in page_text and f"- {second.path}:{second.line}" in page_text
    assert f"- {fourth.path}:{fourth.line}: {fourth.what} ({UNSEEN})" in page_text
    assert (
        f"- {third.path}:{third.line}: {third.what}: {ODD}" in page_text.partition("Not counted")[2]
    )


@pytest.mark.process
@pytest.mark.slow
def test_changes_of_the_source_are_noticed_and_written_down(tmp_path):
    """Recorded, judged in copies of the tree, proven without them, and published; a second run
    finds it all done."""
    source = "orchestrator/plan/learning_rate.py"
    command = [
        sys.executable,
        "-m",
        "tests.mutations.run",
        "orchestrator",
        "--count",
        "3",
        "--only",
        source,
    ]
    command += ["--workers", "1", "--build", str(tmp_path), "--out", str(tmp_path / "page.md")]
    done = subprocess.run(
        [*command, "--record", "tests/planner/test_learning_rate.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if source in line]
    assert len(lines) == 3 and all(re.search(r" s  by a test ", line) for line in lines), (
        done.stdout
    )
    assert "**3 of 3 noticed (100.0 %)**" in (tmp_path / "page.md").read_text()
