"""The two examples in the help of each verb: the parser takes them, their configuration composes,
and those that cost little run."""

from __future__ import annotations

import json
import shlex
from importlib import import_module

import pytest

from orchestrator.cli.examples import EXAMPLES, epilog
from orchestrator.cli.main import help_text, main
from orchestrator.cli.verbs import GROUPS, VERBS
from orchestrator.config.compose import load

LINES = [(verb, line) for verb, lines in EXAMPLES.items() for line in lines]
#: Verbs of which no example needs a run, a GPU or torch.
CHEAP = ("run", "submit", "render", "list", "gc", "plan", "whatif", "config", "init", "topology")
CHEAP += ("completion", "version")
_FABRIC = "SwitchName=leaf1 Nodes=n[1-4]\nSwitchName=spine Switches=leaf1\n"


@pytest.fixture(autouse=True)
def in_a_folder_with_what_they_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").touch()
    for name in ("topology.conf", "other.conf"):
        (tmp_path / name).write_text(_FABRIC)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_ends_with_two_examples(verb, capsys):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    assert capsys.readouterr().out.endswith(f"{epilog(verb)}\n")
    assert len(EXAMPLES[verb]) == 2
    assert all(line.split()[:2] == ["orch", verb] for line in EXAMPLES[verb])


def test_run_is_the_first_verb_and_every_group_has_its_title():
    page = help_text()
    assert next(iter(VERBS)) == "run" and list(GROUPS)[:5] == [
        "run",
        "look",
        "plan",
        "prove",
        "clusters",
    ]
    titles = [page.index(f"\n{title}:\n") for title in GROUPS]
    assert titles == sorted(titles)
    assert page.count("+cluster=") == 1


@pytest.mark.parametrize(("verb", "line"), LINES)
def test_an_example_is_parsed_and_its_configuration_composes(verb, line, monkeypatch):
    calls = []
    # `orch run` translates torchrun's flags and goes on as `orch submit`.
    module = import_module(f"orchestrator.cli.verbs.{'submit' if verb == 'run' else verb}")
    monkeypatch.setattr(module, "run", lambda args, overrides: calls.append((args, overrides)))
    assert main(shlex.split(line)[1:]) == 0
    ((_, overrides),) = calls
    if VERBS[verb].overrides:
        load(overrides)


@pytest.mark.parametrize(("verb", "line"), [entry for entry in LINES if entry[0] in CHEAP])
def test_an_example_that_costs_little_runs(verb, line, capsys):
    words = shlex.split(line)[1:]
    if verb in ("run", "submit"):
        words.insert(1, "--dry-run")
    assert main(words) == 0, capsys.readouterr()


def test_run_and_submit_differ_as_their_help_says(capsys):
    """The defaults of the table: one process and no restarts, three with a range of nodes; the
    cluster `local` and three restarts."""
    policies = {}
    elastic = "run --nnodes 1:2 cluster=local_nodes train.py"
    for words in ("run train.py", elastic, "submit", "submit cluster=local"):
        verb, *arguments = words.split()
        assert main([verb, "--dry-run", "--json", "--run-id", "x", *arguments]) == 0
        policies[words] = json.loads(capsys.readouterr().out)
    assert policies["run train.py"]["summary"]["world_size"] == 1
    assert policies["submit"]["plan_hash"] == policies["submit cluster=local"]["plan_hash"]
    restarts = [request["policy"]["max_restarts"] for request in policies.values()]
    assert restarts == [0, 3, 3, 3]
    assert "restarts" in epilog("run") and epilog("run").split("examples:")[0] in epilog("submit")
