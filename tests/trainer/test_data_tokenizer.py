"""Bytes and tokenizer files; text cannot forge the end of a document."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.tokenizer import ByteTokenizer, load_tokenizer
from trainer.errors import DataError


def word_level(end: str = "<|endoftext|>") -> str:
    """A small tokenizers JSON file: words split on white space."""
    vocab = {"[UNK]": 0, "hello": 1, "world": 2, end: 7}
    special = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return json.dumps(
        {
            "version": "1.0",
            "truncation": {
                "direction": "Right",
                "max_length": 2,
                "strategy": "LongestFirst",
                "stride": 0,
            },
            "padding": None,
            "added_tokens": [{"id": 7, "content": end, **special}],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
        }
    )


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_bytes_are_their_own_ids(texts):
    for content, ids in zip(texts, ByteTokenizer().encode(texts), strict=True):
        assert bytes(ids.astype(np.uint8)) == content and (ids < ByteTokenizer.eod).all()


def test_tokenizer_file(tmp_path):
    (tmp_path / "t.json").write_text(word_level())
    tokenizer = load_tokenizer(str(tmp_path / "t.json"))
    first, second, nothing = tokenizer.encode([b"hello world hello", b"world", b""])
    assert (first.tolist(), second.tolist(), nothing.tolist()) == (
        [1, 2, 1],
        [2],
        [],
    )  # not cut at its max_length
    assert (tokenizer.eod, tokenizer.vocab_size) == (7, 8)


def test_text_cannot_forge_the_end_of_a_document(tmp_path):
    (tmp_path / "t.json").write_text(word_level())
    tokenizer = load_tokenizer(str(tmp_path / "t.json"))
    ids, plain = tokenizer.encode([b"hello <|endoftext|> world <|endoftext|>", b"hello"])
    assert ids.tolist() == [1, 0, 0, 2, 0, 0] and plain.tolist() == [1]


def test_identity_follows_the_content(tmp_path):
    for name, end in (("a", "</s>"), ("b", "</s>"), ("c", "<eos>")):
        (tmp_path / name).write_text(word_level(end))
    a, b, c = (load_tokenizer(str(tmp_path / name)).identity for name in "abc")
    assert a == b != c != load_tokenizer("bytes").identity


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "cannot read tokenizer .*t.json: No such file"),
        ("{}", "is not a tokenizers JSON file"),
        ("hello", "is not a tokenizers JSON file"),
        (word_level("<the end>"), "has no end-of-document token; known names: <|endoftext|>"),
    ],
)
def test_bad_tokenizer_files(tmp_path, content, message):
    if content is not None:
        (tmp_path / "t.json").write_text(content)
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(tmp_path / "t.json"))
    assert message.split(".*")[-1] in str(caught.value) and "\n" not in str(caught.value)
