"""Files make a corpus and become documents; everything that is wrong with them is one clear
line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data import corpus
from trainer.data.corpus import Source, find_sources, read_pieces
from trainer.errors import DataError

EXTENSIONS = [".txt", ".md", ".py", ".jsonl"]


def source(path: Path) -> Source:
    return Source(path.name, path, path.stat().st_size, 0)


def documents(path: Path) -> list[bytes]:
    result = []
    open_text = b""
    for piece in read_pieces(source(path)):
        open_text += piece.text
        if piece.ends_document:
            result.append(open_text)
            open_text = b""
    assert open_text == b""
    return result


def fill(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def test_finds_by_extension_sorted_each_file_once(tmp_path):
    fill(
        tmp_path,
        "b/z.txt",
        "b/a.MD",
        "a.py",
        "c.rst",
        "b/__pycache__/x.py",
        ".git/y.txt",
        "empty.txt",
        "d.jsonl",
    )
    (tmp_path / "link.txt").symlink_to(tmp_path / "b/z.txt")
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    sources = find_sources([str(tmp_path), str(tmp_path / "b")], EXTENSIONS)
    assert [s.path.relative_to(tmp_path).as_posix() for s in sources] == [
        "a.py",
        "b/a.MD",
        "b/z.txt",
        "d.jsonl",
        "empty.txt",
    ]


def test_a_file_named_outright_counts_whatever_its_extension(tmp_path):
    fill(tmp_path, "notes.rst")
    assert len(find_sources([str(tmp_path / "notes.rst")], EXTENSIONS)) == 1


def test_stdlib_is_found_without_its_tests_and_site_packages():
    sources = find_sources(["stdlib"], [".py"])
    names = {s.name for s in sources}
    assert "stdlib/asyncio/tasks.py" in names and len(sources) > 300
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert sources == sorted(sources, key=lambda s: s.path.parts)


@pytest.mark.parametrize(
    "names, paths, message",
    [
        ([], ["nowhere"], r"data path '.*nowhere' does not exist"),
        ([], ["."], r"no .txt/.md/.py/.jsonl files in .*\(found no files at all\)"),
        (["a.rst", "b.rst", "LICENSE"], ["."], r"\(found 2 .rst, 1 no extension\)"),
    ],
)
def test_nothing_to_read(tmp_path, names, paths, message):
    fill(tmp_path, *names)
    with pytest.raises(DataError, match=message):
        find_sources([str(tmp_path / path) for path in paths], EXTENSIONS)


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    """Root can read every folder, so the walk is told to fail."""

    def failing(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(corpus.os, "scandir", failing)
    with pytest.raises(DataError, match=r"cannot read data folder .*: Permission denied"):
        find_sources([str(tmp_path)], EXTENSIONS)


# -------------------------------------------------------------------------------------------
#     documents


@pytest.mark.parametrize(
    "content", ["", "one", "one\n", "one\ntwo\n\nthree", "\n", "é" * 40, "a\r\nb", "日本語\n" * 20]
)
@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, 64, 1 << 20])
def test_a_text_file_is_one_document_however_it_is_cut(tmp_path, monkeypatch, content, piece_bytes):
    monkeypatch.setattr(corpus, "PIECE_BYTES", piece_bytes)
    path = tmp_path / "a.txt"
    path.write_bytes(content.encode())
    assert documents(path) == ([content.encode()] if content else [])


def test_a_file_that_fits_is_never_cut(tmp_path):
    """A tokenizer would see the cut: the end of the last line of every file became tokens of its
    own."""
    (tmp_path / "a.txt").write_text("first line\nhello")
    assert [piece.text for piece in read_pieces(source(tmp_path / "a.txt"))] == [
        b"first line\nhello"
    ]


@given(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60),
    st.integers(1, 20),
)
def test_every_piece_is_whole_characters(tmp_path_factory, content, piece_bytes):
    path = tmp_path_factory.mktemp("pieces") / "a.txt"
    path.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PIECE_BYTES", piece_bytes)
        pieces = [piece.text.decode() for piece in read_pieces(source(path))]
    assert "".join(pieces) == content


def test_jsonl_is_a_document_a_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "one\\ntwo", "id": 3}\n\n{"text": ""}\r\n{"id": [1], "text": "dr\\u00e9i"}'
    )
    assert documents(path) == [b"one\ntwo", "dréi".encode()]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"fine\nab\0c", r"a.txt is not text: it has a zero byte at offset 7"),
        ("a.py", b"fine\n\xff\xfe", r"a.py is not UTF-8 text: invalid start byte at offset 5"),
        ("a.txt", "é".encode()[:1], r"not UTF-8 text: unexpected end of data at offset 0"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', r"a.jsonl:2: .*Expected `str`, got `int`"),
        ("a.jsonl", b'\n{"body": "a"}\n', r"a.jsonl:2: .*missing required field `text`"),
        ("a.jsonl", b'{"text": "a"\n', r"a.jsonl:1: "),
        ("a.jsonl", b"[1]\n", r"a.jsonl:1: .*Expected `object`"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a.jsonl:1: "),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a.jsonl:1: "),
    ],
)
def test_bad_text_is_named_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        documents(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_offsets_count_from_the_start_of_the_file_not_of_the_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE_BYTES", 8)
    (tmp_path / "a.txt").write_bytes(b"0123456\n" * 5 + b"ab\xff")
    with pytest.raises(DataError, match="at offset 42"):
        documents(tmp_path / "a.txt")


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "LINE_BYTES", 1 << 20)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "' + b"a" * (1 << 20) + b'"}\n')
    with pytest.raises(DataError, match=r"a.jsonl:2: line is longer than 1 MiB"):
        documents(tmp_path / "a.jsonl")


def test_a_vanished_file_is_one_line(tmp_path):
    fill(tmp_path, "a.txt")
    (vanished_source,) = find_sources([str(tmp_path)], EXTENSIONS)
    vanished_source.path.unlink()
    with pytest.raises(DataError, match=r"cannot read .*a.txt: No such file or directory"):
        list(read_pieces(vanished_source))
