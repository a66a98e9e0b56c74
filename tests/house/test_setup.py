"""`.ci/setup` and the two commands of the README: what they install, with a stand-in for uv, which
notes how it was called."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.house.rooms import ROOT

#: Where `--dry-run` is asked whether an index answers, it ends as the file `answers` says.
UV = """\
#!/bin/sh
echo "$@" >> calls
case "$*" in
  venv*) mkdir -p .venv/bin && cp python .venv/bin/ ;;
  *--dry-run*) test -e answers ;;
esac
"""
#: Says which torch is installed, as `.ci/setup` asks.
PYTHON = """\
#!/bin/sh
cat torch 2>/dev/null
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    for name in (".ci", "Makefile", "pyproject.toml", "setup.py"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name)
        else:
            shutil.copy(ROOT / name, tmp_path)
    for name, script in (("bin/uv", UV), ("python", PYTHON)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(script)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.delenv("UV_TORCH_BACKEND", raising=False)
    return tmp_path


def installed(checkout: Path, *arguments: str) -> str:
    """Runs `.ci/setup` and returns the last call of uv, which installs the packages."""
    (checkout / "calls").unlink(missing_ok=True)
    setup = [checkout / ".ci" / "setup", *arguments]
    done = subprocess.run(setup, capture_output=True, text=True)
    assert done.returncode == 0, done
    return (checkout / "calls").read_text().splitlines()[-1]


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU")
def test_the_demo_takes_torch_for_the_processor_where_an_index_has_it(checkout):
    assert "cpu" not in installed(checkout, "demo")
    (checkout / "answers").touch()
    call = installed(checkout, "demo")
    assert "--torch-backend cpu" in call and call.endswith("-e .[trainer]")


def test_what_is_installed_is_not_asked_for_again_and_tests_get_torch_for_gpus(checkout):
    (checkout / "answers").touch()
    (checkout / "torch").write_text("2.15.0+cpu\n")
    assert "cpu" not in installed(checkout, "demo")
    stamp = (checkout / ".venv" / ".demo").read_text()
    assert "seconds: .venv has" in stamp and stamp.endswith("with torch 2.15.0+cpu\n")
    call = installed(checkout)
    assert "--reinstall-package torch" in call and call.endswith("-e .[all,dev,docs]")
    (checkout / "torch").write_text("2.15.0\n")
    assert "reinstall" not in installed(checkout)


def test_the_tests_need_more_than_the_demo_and_the_demo_no_more_than_the_tests(checkout):
    def commands(target: str) -> str:
        dry_run = ["make", "--dry-run", "-C", checkout, target]
        return subprocess.run(dry_run, capture_output=True, text=True, check=True).stdout

    assert ".ci/setup demo\n" in commands("demo")
    installed(checkout, "demo")
    assert ".ci/setup" not in commands("demo")
    assert ".ci/setup\n" in commands("test")
    (checkout / ".venv" / ".demo").unlink()
    installed(checkout)
    assert ".ci/setup" not in commands("demo") + commands("test")
