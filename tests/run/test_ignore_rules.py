"""`.orchignore` is read as git reads `.gitignore`: compared with git itself over random patterns
and trees."""

from __future__ import annotations

import os
import random
import re
import subprocess
from pathlib import Path

import pytest

from orchestrator.run.code.ignore_rules import IgnoreRules
from orchestrator.run.code.snapshot import files_by_rules

_NAMES = [b"a", b"b", b"ab", b"a.c", b"B1", b"-x", b"a b", b"[a]", b"!a", b"#a", b"a\\b", b"\xc3\xa9", b"a]"]  # fmt: skip
_PIECES = [b"a", b"b", b"ab", b"c", b".", b"*", b"**", b"?", b"/", b"/**", b"**/", b"/**/", b" ", b"\\", b"\\ ", b"!",
           b"#", b"[a-c]", b"[!a]", b"[^b]", b"[]a]", b"[!]a]", b"[a-]", b"[-x]", b"[b-a]", b"[\\]a]", b"[[:digit:]]",
           b"[[:upper:][:digit:]]", b"[![:alpha:]]", b"[[:nope:]]", b"[[:a]", b"[", b"]", b"[a", b"[\\a-c]", b"\xc3\xa9",
           b"\xc3", b"[\xc3]", b"1", b"B", b"x", b"-", b"[a/b]", b"\t", b"[.-a]", b"***"]  # fmt: skip
#: Stars behind a byte of the same name: gitignore(5) calls them ordinary, git takes them for
#: folders where everything before them is literal.
_OFF_THE_BOOK = re.compile(rb"[^/*\n!]\*\*")


def _content(choice: random.Random) -> bytes:
    lines = []
    for _ in range(choice.randint(1, 6)):
        body = b"".join(choice.choices(_PIECES, k=choice.randint(1, 5)))
        line = choice.choice([b"", b"", b"", b"!", b"/"]) + body + choice.choice([b"", b"", b"/"])
        if not _OFF_THE_BOOK.search(line):
            lines.append(line)
    return choice.choice([b"\n", b"\r\n"]).join(lines) + choice.choice([b"", b"\n", b"  "])


def _fill(root: bytes, choice: random.Random, depth: int = 0) -> None:
    for name in choice.sample(_NAMES, k=choice.randint(1, 5)):
        path = os.path.join(root, name)
        kind = choice.random()
        if kind < 0.4 and depth < 3:
            os.mkdir(path)
            _fill(path, choice, depth + 1)
        elif kind < 0.5:
            os.symlink(b".", path)
        else:
            Path(os.fsdecode(path)).touch()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    _fill(os.fsencode(root), random.Random(0))
    return root


def by_git(root: Path) -> list[str]:
    options = ["--others", "--exclude-per-directory=.gitignore"]
    listing = subprocess.run(["git", "ls-files", "-z", *options], cwd=root, check=True, stdout=-1)
    return sorted(filter(None, os.fsdecode(listing.stdout).split("\0")))


def test_random_patterns_leave_out_what_git_leaves_out(repository):
    choice = random.Random(39)
    ignore_file = repository / ".gitignore"
    for trial in range(int(os.environ.get("ORCH_TEST_TRIALS", "150"))):
        if trial % 10 == 9:
            for old in set(repository.iterdir()) - {repository / ".git"}:
                subprocess.run(["rm", "-rf", "--", str(old)], check=True)
            _fill(os.fsencode(repository), choice)
        content = _content(choice)
        ignore_file.write_bytes(content)
        files = sorted(files_by_rules(repository, IgnoreRules(content)))
        assert files == by_git(repository), content
