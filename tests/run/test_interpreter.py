"""Which Python starts a user's program: `PYTHON_EXEC`, the activated environment, orch's own."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import OrchError
from orchestrator.run.interpreter import (
    Interpreter,
    choose_interpreter,
    interpreter_messages,
    started_command,
)

OWN = "/orch/bin/python"


class Tree:
    """A file system with these executables, of which some are links to others."""

    def __init__(self, *executables: str, **links: str) -> None:
        self.links = {path: path for path in executables} | links

    def find(self, command: str, path: str) -> str | None:
        if "/" in command:
            return command if command in self.links else None
        files = (f"{folder}/{command}" for folder in path.split(":"))
        return next((file for file in files if file in self.links), None)

    def identity(self, path: str) -> tuple[str, str]:
        return str(PurePosixPath(path).parent), self.links.get(path, path)


#: Environments with links to one Python, as `python -m venv` makes them.
ENVIRONMENTS = ("/orch", "/venv", "/conda", "/usr")
TREE = Tree(
    *(f"{prefix}/bin/python" for prefix in ENVIRONMENTS),
    "/opt/python3.13",
    "/bin/sh",
    **{f"{prefix}/bin/python3": f"{prefix}/bin/python" for prefix in ENVIRONMENTS},
)


@pytest.mark.parametrize(
    ("environ", "chosen"),
    [
        ({}, (OWN, "")),
        ({"PATH": "/usr/bin"}, (OWN, "")),
        ({"PATH": "/venv/bin:/usr/bin"}, (OWN, "")),  # nothing says that it is activated
        (
            {"PATH": "/venv/bin:/usr/bin", "VIRTUAL_ENV": "/venv"},
            ("/venv/bin/python", "VIRTUAL_ENV"),
        ),
        ({"PATH": "/conda/bin", "CONDA_PREFIX": "/conda"}, ("/conda/bin/python", "CONDA_PREFIX")),
        # the environment that was activated last is first on PATH
        (
            {"PATH": "/conda/bin:/venv/bin", "VIRTUAL_ENV": "/venv", "CONDA_PREFIX": "/conda"},
            ("/conda/bin/python", "CONDA_PREFIX"),
        ),
        ({"PATH": "/usr/bin:/venv/bin", "VIRTUAL_ENV": "/venv"}, (OWN, "")),
        ({"PATH": "/usr/bin", "VIRTUAL_ENV": "/removed"}, (OWN, "")),
        ({"PATH": "/orch/bin", "VIRTUAL_ENV": "/orch"}, (OWN, "")),
        (
            {"PATH": "/venv/bin", "VIRTUAL_ENV": "/venv", "PYTHON_EXEC": ""},
            ("/venv/bin/python", "VIRTUAL_ENV"),
        ),
        (
            {"PATH": "/venv/bin", "VIRTUAL_ENV": "/venv", "PYTHON_EXEC": "/opt/python3.13"},
            ("/opt/python3.13", "PYTHON_EXEC"),
        ),
        ({"PATH": "/usr/bin", "PYTHON_EXEC": "python3"}, ("/usr/bin/python3", "PYTHON_EXEC")),
    ],
)
def test_the_rule(environ, chosen):
    assert choose_interpreter(environ, OWN, TREE) == chosen


@pytest.mark.parametrize("requested", ["/opt/missing", "python3.14"])
def test_an_interpreter_that_cannot_be_executed_is_refused(requested):
    with pytest.raises(OrchError) as refused:
        choose_interpreter({"PATH": "/usr/bin", "PYTHON_EXEC": requested}, OWN, TREE)
    assert refused.value.message == f"PYTHON_EXEC={requested} is not an executable file"
    assert refused.value.exit == 65


FOLDERS = st.lists(st.sampled_from([*(f"{prefix}/bin" for prefix in ENVIRONMENTS), "/opt"]))
PREFIXES = st.sampled_from([*ENVIRONMENTS, ""])


@given(FOLDERS, PREFIXES, PREFIXES, st.sampled_from(["python", "python3"]))
def test_python_is_the_shell_s_or_another_one_is_named(folders, venv, conda, name):
    """The user never gets another Python than that of the shell without a line that names it, nor a
    line about one that everybody expects."""
    path = ":".join(folders)
    environ = {"PATH": path, "VIRTUAL_ENV": venv, "CONDA_PREFIX": conda}
    interpreter = choose_interpreter(environ, OWN, TREE)
    argv = started_command([name, "train.py"], interpreter, TREE)
    started = TREE.find(argv[0], f"{interpreter.folder}:{path}")
    assert TREE.identity(started) == TREE.identity(interpreter.path)
    messages = interpreter_messages([name], interpreter, OWN, path, "X", TREE)
    of_shell = TREE.find(name, path)
    is_expected = interpreter.path == OWN and of_shell in (None, f"/orch/bin/{name}")
    assert bool(messages) == (not is_expected)
    assert all(interpreter.path in line for line in messages)


@pytest.mark.parametrize(
    ("command", "path", "started"),
    [
        (["python", "x"], "/venv/bin/python", ("python", "x")),
        (["python3", "x"], "/venv/bin/python", ("python3", "x")),
        (["python3", "x"], "/opt/python3.13", ("/opt/python3.13", "x")),
        (["python3.11", "x"], "/opt/python3.13", ("python3.11", "x")),
        (["/usr/bin/python", "x"], "/venv/bin/python", ("/usr/bin/python", "x")),
        (["sh", "python"], "/venv/bin/python", ("sh", "python")),
        ([], "/venv/bin/python", ()),
    ],
)
def test_only_python_and_python3_mean_the_chosen_interpreter(command, path, started):
    interpreter = Interpreter(path, "")
    assert started_command(command, interpreter, TREE) == started
    if started[:1] not in (("python",), ("python3",), ("/opt/python3.13",)):
        assert interpreter_messages(command, interpreter, OWN, "/usr/bin", "X", TREE) == []
