"""The mutation run: its sites, its trees, and one mutant of the trainer, which must be noticed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.mutations.run import LIMIT_S, ODD, ROOT, every_site, files_of_tests, page, sample
from tests.mutations.run import Result as Judged
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
    found = {site.what.split(" in `")[0]: after(site.number) for site in sites("x.py", SOURCE)}
    assert "if a <= 2" in found["comparison Lt"] and "if not a < 2" in found["condition negated"]
    assert "list(rest)[0]" in found["sorted left out"] and "[0] + 3" in found["operator Mult"]
    assert "g('cp', a)" in found["group 'tp'"] and "g(a, 'tp')" in found["first two arguments swapped"]
    assert "h(total)" not in found["statement removed"] and "return +total" in found["sign"]
    assert "a: int=0" in found["constant 1"] and "* 4" in found["constant 3"]


def test_messages_and_docstrings_are_left_alone():
    assert all('f"{' not in site.what and "docstring" not in site.what for site in sites("x.py", SOURCE))
    trees = {after(site.number) for site in sites("x.py", SOURCE)}
    assert len(trees) == len(sites("x.py", SOURCE)) and ast.unparse(ast.parse(SOURCE)) not in trees


def test_the_whole_trainer_has_sites_and_every_file_has_tests():
    found = every_site()
    assert len(found) > 2000 and len({site.path for site in found}) > 40
    assert all(files_of_tests(site) for site in found)
    assert sample(5, 3) == sample(5, 3) != sample(5, 4)
    for site in found[::97]:
        compile(mutated((ROOT / site.path).read_text(), site.number), site.path, "exec")


def test_the_page_counts():
    one, other, third = sample(3, 1)
    text = page([Judged(one, "verify", 1.0), Judged(other, "", 1.0), Judged(third, ODD, 1.0)], 4000, 1)
    assert "1 of 2 noticed (50.0 %)" in text and f"- {other.path}:{other.line}" in text
    assert f"- {third.path}:{third.line}: {third.what}: {ODD}" in text.partition("Not counted")[2]


@pytest.mark.process
@pytest.mark.slow
def test_a_change_of_the_source_is_noticed():
    command = [sys.executable, "-m", "tests.mutations.run", "--count", "1", "--seed", "1", "--only", "trainer/optim/*"]
    command += ["--no-control"]  # the suite that this test belongs to runs them
    limit_s = LIMIT_S + PATIENCE_S
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    noticed = [line for line in lines if re.search(r" s  by (verify|a test|its import) ", line)]
    assert len(noticed) == len(lines) == 1, done.stdout
