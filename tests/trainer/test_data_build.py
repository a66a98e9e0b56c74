"""Token files: built once, found again, shared by processes, and never half there."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from orchestrator.plan.document import Data
from tests.patience import wait_for
from tests.trainer.states import flip_bit
from tests.trainer.test_data_tokenizer import word_level
from trainer.data import build
from trainer.data.build import open_tokens, rate_limited
from trainer.data.store import BLOCK_BYTES, TokenStore
from trainer.errors import DataError

EOD = 256


@pytest.fixture
def corpus(tmp_path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("hello")
    (folder / "b.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (folder / "c.md").write_text("")
    return folder


def data(corpus: Path, **changes) -> Data:
    fields = {
        "name": "test",
        "paths": [str(corpus)],
        "extensions": [".txt", ".md", ".jsonl"],
        "tokenizer": "bytes",
    }
    return Data(**fields | {"seed": 1, "cache_dir": str(corpus.parent / "cache")} | changes)


class Log(list):
    """A progress callback that remembers."""

    def __call__(self, phase: str, done: int, total: int) -> None:
        self.append((phase, done, total))

    @property
    def phases(self) -> set[str]:
        return {phase for phase, _, _ in self}


def test_documents_in_order_each_with_its_end(corpus):
    store = open_tokens(data(corpus))
    assert store.tokens.tolist() == [*b"hello", EOD, *b"one", EOD, *b"two", EOD]
    assert store.documents.tolist() == [0, 6, 10, 14]
    index = store.index
    assert (index.tokens, index.documents, index.source_files, index.source_bytes) == (14, 3, 3, 37)
    assert store.tokens.dtype == np.dtype("<u2")


def test_samples_cover_each_target_once(corpus):
    store = open_tokens(data(corpus))
    assert (store.samples(4), store.samples(13), store.samples(14)) == (3, 1, 0)
    windows = [store.window(index, 4).tolist() for index in range(3)]
    assert [token for window in windows for token in window[1:]] == store.tokens[1:13].tolist()


def test_a_wide_vocabulary_takes_four_bytes(corpus):
    (corpus / "t.json").write_text(
        word_level().replace('"id": 7', '"id": 70000').replace(": 7}", ": 70000}")
    )
    store = open_tokens(data(corpus, tokenizer=str(corpus / "t.json")))
    assert store.tokens.tolist() == [
        1,
        70000,
        0,
        70000,
        0,
        70000,
    ] and store.tokens.dtype == np.dtype("<u4")


def test_second_time_nothing_is_read(corpus, monkeypatch):
    first = open_tokens(data(corpus))
    log = Log()
    monkeypatch.setattr(build, "read_pieces", None)
    monkeypatch.setattr(build, "_content_key", None)
    assert open_tokens(data(corpus), log).folder == first.folder and not log


def test_moved_or_touched_files_are_not_tokenised_again(corpus):
    first = open_tokens(data(corpus))
    log = Log()
    os.utime(corpus / "a.txt", ns=(1, 1))
    moved = corpus.rename(corpus.parent / "moved")
    assert open_tokens(data(moved), log).folder == first.folder and log.phases == {"hash"}


@pytest.mark.parametrize("change", ["content", "tokenizer", "new file", "kind"])
def test_what_changes_tokens_changes_the_key(corpus, change):
    first = open_tokens(data(corpus))
    tokenizer = "bytes"
    if change == "content":
        (corpus / "a.txt").write_text("hallo")
    elif change == "tokenizer":
        (corpus.parent / "t.json").write_text(word_level())
        tokenizer = str(corpus.parent / "t.json")
    elif change == "new file":
        (corpus / "d.txt").write_text("more")
    else:
        (corpus / "b.jsonl").rename(corpus / "b.txt")
    second = open_tokens(data(corpus, tokenizer=tokenizer))
    assert second.index.key != first.index.key and second.folder != first.folder


def test_progress_ends_at_all_bytes(corpus):
    log = Log()
    open_tokens(data(corpus), log)
    assert log[-1] == ("tokenise", 37, 37) and ("hash", 37, 37) in log


def test_a_corpus_that_changes_under_our_hands_is_refused(corpus):
    def meddle(phase: str, *_: int) -> None:
        if phase == "tokenise":
            (corpus / "a.txt").write_text("changed")

    with pytest.raises(DataError, match="changed while it was being read"):
        open_tokens(data(corpus), meddle)
    assert bytes(open_tokens(data(corpus)).tokens[:7].astype(np.uint8)) == b"changed"


def test_a_bad_file_leaves_nothing_behind(corpus):
    (corpus / "z.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"z.txt is not UTF-8"):
        open_tokens(data(corpus))
    cache = corpus.parent / "cache"
    assert [entry.name for entry in cache.iterdir()] == ["seen"] and not list(
        cache.glob("seen/*.json")
    )


@pytest.mark.parametrize("damage", ["truncated", "no file", "bad index", "other format"])
def test_damaged_token_files_are_refused(corpus, damage):
    folder = open_tokens(data(corpus)).folder
    if damage == "truncated":
        os.truncate(folder / "tokens.bin", 5)
    elif damage == "no file":
        (folder / "documents.bin").unlink()
    elif damage == "bad index":
        (folder / "index.json").write_text("{")
    else:
        (folder / "index.json").write_text(
            (folder / "index.json").read_text().replace("tokens/2", "tokens/9")
        )
    with pytest.raises(
        DataError, match=r"token files in .* are damaged .* delete that folder"
    ) as caught:
        open_tokens(data(corpus))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokens.bin", "blocks.bin"])
def test_a_flipped_bit_is_found_before_anybody_trains_on_it(corpus, name):
    (corpus / "a.txt").write_text("x" * 200_000)  # seven blocks, of which the last is shorter
    store = open_tokens(data(corpus))
    windows = [store.window(sample, 16).tobytes() for sample in range(store.samples(16))]
    width = store.tokens.dtype.itemsize
    assert (
        b"".join(window[:-width] for window in windows)
        == store.tokens[: len(windows) * 16].tobytes()
    )
    file = store.folder / name
    flip_bit(file)
    if name == "blocks.bin":
        with pytest.raises(DataError, match=r"are damaged \(blocks.bin does not have the sha256"):
            open_tokens(data(corpus))
        return
    again = open_tokens(data(corpus))
    damaged_samples = []
    bad = file.stat().st_size * 3 // 4 // BLOCK_BYTES
    for token_store in (store, again):  # open before it happened, and after
        damaged_samples.clear()
        for sample in range(token_store.samples(16)):
            try:
                assert token_store.window(sample, 16).tobytes() == windows[sample]
            except DataError as error:
                assert "tokens.bin has changed since it was written" in str(error)
                damaged_samples.append(sample)
        edges = bad * BLOCK_BYTES // width, (bad + 1) * BLOCK_BYTES // width
        assert damaged_samples == list(range((edges[0] - 1) // 16, -(-edges[1] // 16)))
    os.truncate(file, 100)
    with pytest.raises(DataError, match="has changed"):
        store.window(0, 16)


def test_pipes_and_devices_are_refused_without_a_wait_and_an_empty_text_has_no_sample(corpus):
    os.mkfifo(corpus / "pipe")
    for odd in (str(corpus / "pipe"), "/dev/zero"):
        with pytest.raises(DataError, match="is neither a file nor a folder"):
            open_tokens(data(corpus, paths=[odd]))
        with pytest.raises(DataError, match="not a regular file"):
            open_tokens(data(corpus, tokenizer=odd))
    (corpus / "empty.txt").touch()
    assert open_tokens(data(corpus, paths=[str(corpus / "empty.txt")])).samples(1) == 0


def test_a_forgotten_cache_folder_is_rebuilt(corpus):
    folder = open_tokens(data(corpus)).folder
    folder.rename(folder.parent / "gone")
    assert open_tokens(data(corpus)).index.tokens == 14


def test_no_cache_dir_and_no_right_to_write(corpus):
    with pytest.raises(DataError, match="cache_dir is empty"):
        open_tokens(data(corpus, cache_dir=""))
    (corpus.parent / "file").write_text("")
    with pytest.raises(
        DataError, match=r"cannot write token files under .*file .* choose another data.cache_dir"
    ):
        open_tokens(data(corpus, cache_dir=str(corpus.parent / "file")))


def test_works_where_the_file_system_has_no_locks(corpus, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(build.fcntl, "flock", refuse)
    assert open_tokens(data(corpus)).index.tokens == 14


def test_without_locks_the_faster_builder_wins_and_both_read_it(corpus, monkeypatch):
    real = build.TokenWriter

    def slower(folder, tokenizer):
        if monkeypatch is not None:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(build, "TokenWriter", real)
                inner.setattr(build.os, "getpid", lambda: 999_999_999)
                sources = build.find_sources([str(corpus)], [".txt"])
                key = folder.name.partition(".")[0]
                build._build(folder.parent, key, sources, tokenizer, lambda *_: None)
        return real(folder, tokenizer)

    monkeypatch.setattr(build, "TokenWriter", slower)
    store = open_tokens(data(corpus, extensions=[".txt"]))
    assert store.tokens.tolist() == [*b"hello", EOD]
    assert not list((corpus.parent / "cache").glob("*.tmp-*"))


# -------------------------------------------------------------------------------------------
#     processes


def fork(work) -> int:
    """Run `work` in a child; its exit status is 0 when `work` returned."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


@pytest.mark.process
def test_many_processes_build_once(corpus):
    (corpus / "big.txt").write_text("some words on a line\n" * 200_000)

    def work() -> None:
        log = Log()
        store = open_tokens(data(corpus), log)
        (corpus.parent / f"out-{os.getpid()}").write_text(
            f"{store.index.key} {'tokenise' in log.phases}"
        )

    children = [fork(work) for _ in range(6)]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 6
    outcomes = [(corpus.parent / f"out-{pid}").read_text().split() for pid in children]
    assert len({key for key, _ in outcomes}) == 1
    assert sorted(built for _, built in outcomes) == ["False"] * 5 + ["True"]


@pytest.mark.process
def test_a_killed_builder_neither_blocks_nor_leaves_half_a_store(corpus):
    cache = corpus.parent / "cache"

    def die(phase: str, *_: int) -> None:
        if phase == "tokenise":
            os.kill(os.getpid(), signal.SIGKILL)

    pid = fork(lambda: open_tokens(data(corpus), die))
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert len(list(cache.glob("*.tmp-*"))) == 1
    assert open_tokens(data(corpus)).index.tokens == 14
    assert not list(cache.glob("*.tmp-*"))


@pytest.mark.process
def test_the_waiting_process_says_so(corpus):
    started = corpus.parent / "started"
    report_file = corpus.parent / "told"

    def hold_the_lock(phase: str, *_: int) -> None:
        started.touch()
        wait_for(report_file.exists, what="the other process")

    def say(*progress: int) -> None:
        log(*progress)
        report_file.touch()

    log = Log()
    pid = fork(lambda: open_tokens(data(corpus), hold_the_lock))
    wait_for(started.exists, what="the lock")
    assert isinstance(open_tokens(data(corpus), say), TokenStore) and log.phases == {"wait"}
    assert os.waitpid(pid, 0)[1] == 0


# -------------------------------------------------------------------------------------------
#     progress


def test_rate_limited_progress_keeps_the_first_and_last_of_each_phase():
    now = [0.0]
    log = Log()
    call = rate_limited(log, 1.0, clock=lambda: now[0])
    for phase in ("hash", "tokenise"):
        for done in range(11):
            now[0] += 0.3
            call(phase, done, 10)
    hash_progress = [done for phase, done, _ in log if phase == "hash"]
    assert hash_progress[0] == 0 and hash_progress[-1] == 10 and len(hash_progress) < 6
    assert ("tokenise", 0, 10) in log and ("tokenise", 10, 10) in log
