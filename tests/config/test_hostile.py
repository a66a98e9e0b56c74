"""Hostile text in every field that takes text: refused with one line, or passed on byte-exact."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.config.compose import load
from orchestrator.config.overrides import quote
from orchestrator.config.schema import Config
from orchestrator.config.structured import fields, is_text, struct_of
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from tests.beds.bundles import refusal

from .test_compose import write

HOSTILE = [
    "a\nb", "a\r\nb", "tab\there", "nul\0byte", "bell\x07", "esc\x1b[31m", "\x7f", "\u2028line", "\u202eright-to-left",
    "\ud800",  # what os.fsdecode makes of a byte that is not UTF-8
    "'single'", '"double"', "it's", '5" disk', "back\\slash", "ends with \\", "\\'",
    "$(touch /tmp/x)", "`id`", "$HOME", "${HOME}", "${oc.env:HOME}", "${${a}:HOME}", "; rm -rf /", "a && b | c > d",
    "größe", "日本語", "🚀", "e\u0301",  # the last is decomposed: must not be normalised
    " leading and trailing ", "a,b", "[a]", "{a: b}", "a: b # c", "null", "~", "true", "1e5", "007", "1_000", "0x10",
    "-", "--help", "=", "a=b=c", "@", "../../etc/passwd", "*?[]", "%s %d {0}", "???", "_target_", "",
    "x" * 41, "x" * 64, "x" * 5000,
]  # fmt: skip


def text_keys(struct: Any = Config, where: str = "") -> list[str]:
    """Every dotted key that holds free text."""
    keys = []
    for name, field in fields(struct).items():
        nested = struct_of(field.type)
        if nested:
            keys += text_keys(nested, f"{where}{name}.")
        elif is_text(field.type):
            keys.append(where + name)
    return keys


KEYS = [key for key in text_keys() if not key.startswith("choices")]


def get(config: Config, key: str) -> Any:
    for field_name in key.split("."):
        config = getattr(config, field_name)
    return config


def assert_refused_or_exact(key: str, raw: str) -> None:
    try:
        loaded = get(load([f"{key}={raw}"]), key)
    except OrchError as error:
        assert error.exit in (Exit.USAGE, Exit.SECURITY)
        assert len(error.message) < 1000 and error.message.isprintable()
        error.message.encode()  # can be printed
        return
    if raw == "null":
        assert loaded is None or loaded == "null" or key == "run.name"  # null asks for the default
    else:
        assert loaded == raw
        assert json.loads(json.dumps(loaded)) == raw


@pytest.mark.parametrize("raw", HOSTILE, ids=[ascii(raw)[:24] for raw in HOSTILE])
@pytest.mark.parametrize(
    "key",
    ["run.name", "cluster.gpu.source", pytest.param("data.tokenizer", marks=pytest.mark.full)],
)
def test_hostile_text_is_refused_or_exact(key, raw):
    assert_refused_or_exact(key, raw)


@pytest.mark.parametrize("key", KEYS)
def test_every_text_field_refuses_a_newline_and_an_endless_name(key):
    for bad_text in ("a\nb", "a\0b", "\ud800"):
        with pytest.raises(OrchError):
            load([f"{key}={bad_text}"])
    with pytest.raises(OrchError) as refused:
        load([f"{key}={'x' * 5000}"])
    assert len(refused.value.message) < 1000


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30).filter(lambda path: "${" not in path and path not in ("null", "???")))
@example("\\")
@example("a\\'b\\\\'")
@example("'\\'")
def test_any_text_of_a_path_is_refused_or_exact(path):
    try:
        assert load([f"data.tokenizer={path}"]).data.tokenizer == path
    except OrchError:
        bare = path.strip()
        assert (
            not path.isprintable()
            or not path
            or "_target_" in path
            or (bare[0] == bare[-1] and bare[0] in "'\"")
        )


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab'\"\\ $,[]{}=:#~éß"), max_size=12))
def test_quote_is_read_back_by_hydra_exactly(raw_text):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    assert OverridesParser.create().parse_override(f"k={quote(raw_text)}").value() == raw_text


@pytest.mark.parametrize(
    "raw_text", ["/a b/$(id)", "/größe", "it's", 'say "x"', "a\\b", "a,b", "#x", "C:\\dir\\"]
)
def test_lists_pass_quoted_text_exactly(raw_text):
    assert load([f"data.paths=[{quote(raw_text)}]"]).data.paths == [raw_text]


@pytest.mark.parametrize(
    "value", ['"a\\nb"', '"\\0"', "|\n  two\n  lines", '"\\u202e"', '"\\x1b[2J"', "''"]
)
@pytest.mark.parametrize("key", ["name", "source"])
def test_files_cannot_bring_control_characters(tmp_path, key, value):
    write(tmp_path, model__mine=f"defaults:\n- tiny\n- _self_\n{key}: {value}\n")
    with pytest.raises(OrchError) as refused:
        load(["model=mine"], tmp_path)
    assert refused.value.exit == Exit.CONFIG
    assert "mine.yaml" in refused.value.message and refused.value.message.isprintable()


def test_configuration_runs_no_code(tmp_path):
    mark = tmp_path / "mark"
    write(
        tmp_path,
        backend__mine=(
            f"name: mine\noptions:\n  _target_: pathlib.Path.touch\n  _args_: ['{mark}']\n"
        ),
    )
    for overrides, folder in ((["backend=mine"], tmp_path), (["+train._target_=os.system"], None)):
        with pytest.raises(OrchError) as refused:
            load(overrides, folder)
        assert refused.value.exit == Exit.SECURITY
    write(tmp_path, backend__mine="name: mine\noptions: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(OrchError):
        load(["backend=mine"], tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "source_text",
    [
        "${oc.env:ORCH_SECRET}",
        "${${run.name}:ORCH_SECRET}",
        "x${oc.env:ORCH_SECRET,d}y",
        "${oc.decode:'${oc.env:X}'}",
    ],
)
def test_secrets_of_the_environment_cannot_come_in(tmp_path, monkeypatch, source_text):
    monkeypatch.setenv("ORCH_SECRET", "hunter2")
    write(tmp_path, model__mine=f"defaults:\n- tiny\n- _self_\nsource: {json.dumps(source_text)}\n")
    with pytest.raises(OrchError) as refused:
        load(["model=mine"], tmp_path)
    assert refused.value.exit == Exit.SECURITY
    assert "hunter2" not in refused.value.message


#: 9 ** 9 values in a few hundred bytes.
BOMB = "a0: &a0 [1, 2]\n" + "".join(
    f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9)
)


@pytest.mark.parametrize(
    ("file_text", "says"),
    [
        (BOMB, "expand it to more than 20,000 values"),
        (BOMB.replace("[", "{k: 1, <<: [").replace("]", "]}"), "aliases expand it"),
        ("layers: &l {x: *l}\n", "contains itself"),
        ("a: &r {self: [1, {b: *r}]}\n", "contains itself"),
        ("layers: " + "[" * 5000, "nested too deeply"),
        ("layers: " + "{a: " * 3000, "nested too deeply"),
        ("layers: " + "[" * 900 + "]" * 900, "nested too deeply"),
        ("".join(" " * depth + "a:\n" for depth in range(900)), "nested too deeply"),
        ("a: &a 1\nb: *a\nlayers: " + "[" * 5000, "nested too deeply"),
    ],
    ids=[
        "bomb",
        "merged bomb",
        "recursive",
        "recursive below",
        "lists",
        "mappings",
        "closed",
        "blocks",
        "with aliases",
    ],
)
@pytest.mark.parametrize("where", ["model__mine", "train__mine", "orch"])
def test_files_whose_values_have_no_end_are_refused_in_one_line(tmp_path, where, file_text, says):
    files = {where: file_text}
    write(tmp_path, **files)
    group = where.partition("__")[0]
    with refusal(says, Exit.CONFIG):
        load([f"{group}=mine"] if group != where else [], tmp_path)
    with refusal(str(tmp_path), Exit.CONFIG):
        load([f"{group}=mine"] if group != where else [], tmp_path)


def test_a_few_aliases_are_as_good_as_their_text(tmp_path):
    write(tmp_path, train__mine="steps: &n 8\nseq_len: *n\nglobal_batch_samples: *n\n")
    assert load(["train=mine"], tmp_path).train.seq_len == 8
