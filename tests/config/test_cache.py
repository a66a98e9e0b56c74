"""What was composed before is read back: equal to hydra_compose anew, never stale, and no more than
a help."""

from __future__ import annotations

import pytest

from orchestrator.cache import MOST, Entry
from orchestrator.config import hydra_compose
from orchestrator.config.compose import load

WORDS = ["cluster=h100x64", "parallel=tp8_pp4", "train.steps=7", "backend.options={a: [1, x]}"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def composed(monkeypatch):
    """Counts what Hydra is asked for."""
    calls = []
    real = hydra_compose.compose
    monkeypatch.setattr(hydra_compose, "compose", lambda *args: calls.append(args) or real(*args))
    return calls


def files(home):
    return sorted((home / "orch" / "config").iterdir())


def test_the_same_words_are_composed_once(home, composed):
    first = load(WORDS)
    second = load(WORDS)
    assert first == second and len(composed) == 1
    assert load(WORDS[:2]) != first and len(composed) == 2
    assert [path.stat().st_mode & 0o777 for path in files(home)] == [0o600, 0o600]


def test_a_changed_file_is_seen(home, composed, tmp_path):
    user = tmp_path / "conf"
    (user / "train").mkdir(parents=True)
    group_file = user / "train" / "mine.yaml"
    for steps in (5, 6, 5):
        group_file.write_text(f"steps: {steps}\nseq_len: 8\nglobal_batch_samples: 4\n")
        assert load(["train=mine"], user).train.steps == steps
    assert len(composed) == 2  # the first content is the first content again


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"cluster": 3}', None], ids=str)
def test_what_cannot_be_read_is_composed_again(home, composed, content):
    first = load(WORDS)
    (path,) = files(home)
    if content is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(content)
    assert load(WORDS) == first and len(composed) == 2


def test_an_environment_is_not_written_down(home, composed):
    overrides = [*WORDS, "backend.env={TOKEN: hidden}"]
    assert load(overrides) == load(overrides) and len(composed) == 2
    assert not home.exists()


def test_a_home_that_cannot_be_written_is_no_error(home, composed):
    home.write_text("not a folder")
    assert load(WORDS) == load(WORDS) and len(composed) == 2


def test_who_has_no_home_keeps_nothing(home, composed, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.chdir(tmp_path)
    assert load(WORDS) == load(WORDS) and len(composed) == 2
    assert not list(tmp_path.iterdir())


def test_large_ones_count_by_their_size(home):
    for number in range(4):
        Entry("some", [bytes([number])], max_bytes=100).write(b"x" * 40)
    assert len(list((home / "orch" / "some").iterdir())) == 2
    Entry("some", [b"large"], max_bytes=100).write(b"x" * 400)
    assert [path.stat().st_size for path in (home / "orch" / "some").iterdir()] == [400]


def test_the_oldest_are_forgotten(home, composed):
    load(WORDS)
    folder = home / "orch" / "config"
    for number in range(MOST + 5):
        (folder / f"{number}.json").write_text("")
    load(WORDS[:2])
    assert len(files(home)) == MOST
