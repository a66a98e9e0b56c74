"""Composition: defaults, whose files win, what words mean, what comes out."""

from __future__ import annotations

import os
from operator import attrgetter
from pathlib import Path

import msgspec
import pytest

from orchestrator.config.compose import load
from orchestrator.config.groups import GROUPS, OPTIONAL, Library, folders, shipped
from orchestrator.config.schema import Config
from orchestrator.config.structured import config_dataclass, fields, struct_of
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

TRAIN = "steps: 10\nseq_len: 8\nglobal_batch_samples: 8\n"


def write(folder: Path, **files: str) -> Path:
    """`train__mine="..."` becomes train/mine.yaml."""
    for name, content in files.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def test_defaults_on_this_machine_and_away_from_it():
    local = load([])
    away = load(["cluster=h100x64"])
    names = [group.name for group in (local.cluster, local.model, local.data, local.backend)]
    assert names == ["local", "tiny", "stdlib", "local"]
    assert (away.model.name, away.data.name) == ("llama3_70b", "stdlib")
    assert local.data.demo and local.train.precision == "fp32"
    assert local.cluster.nodes >= 2


@pytest.mark.parametrize(
    ("line", "folder"),
    [
        ("backend=slurm", None),
        ("cluster=h100x64", None),
        ("cluster=slurm", None),
        ("cluster=kubernetes", None),
        ("cluster=h100x64 backend=preemptible", "slurm"),
        ("cluster=h100x64 backend=nvl72_block", "slurm"),
    ],
)
def test_on_schedulers_no_rank_records_its_first_steps_unasked(line, folder):
    """It is a file a rank, and the device is waited for at both ends of each step."""
    where = None if folder is None else Path(__file__).parents[2] / folder
    metrics = load(line.split(), where).metrics
    assert (metrics.trace_steps, metrics.memory_every_steps) == (0, 100)
    wished = load([*line.split(), "metrics=default", "metrics.trace_steps=3"], where).metrics
    assert (wished.trace_steps, wished.memory_every_steps) == (3, 10), "the command line wins"
    assert load([]).metrics.trace_steps == 2, "on this machine"


def test_plus_is_optional_everywhere():
    plain = load(["cluster=h100x64", "train.steps=7"])
    assert (
        load(["+cluster=h100x64", "+train.steps=7"])
        == plain
        == load(["++cluster=h100x64", "++train.steps=7"])
    )


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        # the command line wins over a cluster's choice, and later ones over earlier ones
        ("model=gpt2", "model.name", "gpt2"),
        ("model=gpt2 cluster=local", "model.name", "gpt2"),
        ("train.steps=5 train.steps=6", "train.steps", 6),
        ("cluster=h100x64 cluster=h100x8", "cluster.name", "h100x8"),
        ("parallel=tp2 parallel=pp2", "parallel.tp", 1),
        ("parallel=tp2_pp2 parallel.pp=4", "parallel.pp", 4),
        # one batch setting replaces the other
        ("train.global_batch_tokens=8192", "train.global_batch_tokens", 8192),
        ("train.global_batch_tokens=8192", "train.global_batch_samples", None),
        # derived shapes are numbers
        ("model=gpt2", "model.kv_heads", 12),
        ("model=gpt2", "model.head_dim", 64),
        ("model.hidden=256", "model.head_dim", 32),
        # a run's name is a legal label
        ("", "run.name", "tiny-default"),
        ("parallel=tp2_pp2_zero1", "run.name", "tiny-tp2-pp2-zero1"),
        ("run.name=mine", "run.name", "mine"),
        # interpolations are resolved once
        ("cluster=h100x64 model=gpt2", "train.seq_len", 1024),
        ("data.tokenizer=${model.name}", "data.tokenizer", "tiny"),
        # open parts take new keys
        (
            "backend.options.partition=gpu +backend.options.n=3",
            "backend.options",
            {"partition": "gpu", "n": 3},
        ),
        ("backend.env.NCCL_DEBUG=INFO", "backend.env", {"NCCL_DEBUG": "INFO"}),
    ],
)
def test_what_a_line_sets(line, key, value):
    assert attrgetter(key)(load(line.split())) == value


def test_items_of_lists():
    assert load(["cluster.nodes=3"]).cluster.levels[0].nodes_per_switch == 3
    assert (
        load(["cluster=h100x64", "cluster.levels.1.oversubscription=3"])
        .cluster.levels[1]
        .oversubscription
        == 3
    )


def test_a_word_equals_its_file_and_is_recorded():
    by_file = load(["parallel=tp8_pp4_zero1"])
    by_word = load(["parallel=zero1_pp4_tp8"])
    assert by_file.parallel == by_word.parallel
    assert by_word.choices["parallel"] == "zero1_pp4_tp8"
    assert set(GROUPS) - {OPTIONAL} == set(by_word.choices)


def test_an_experiment_chooses_files_of_the_other_groups_and_words_win_over_it():
    config = load(["+experiment=megatron_530b", "cluster.nodes=70", "train.recompute=full"])
    assert (config.model.name, config.cluster.name, config.choices["parallel"]) == (
        "megatron_530b",
        "selene",
        "tp8_pp35_vpp3",
    )
    assert (config.cluster.nodes, config.train.recompute, config.cost.software) == (
        70,
        "full",
        "megatron_2021",
    )
    assert config.experiment.step_s == 37.83 and load([]).experiment is None
    assert (
        load(["experiment=megatron_530b", "parallel=tp8_pp7", "cluster=h100x64"]).parallel.pp == 7
    )


def test_a_long_run_name_is_cut_to_a_label():
    name = load(
        ["model=turing_nlg_17b", "cluster=h100x64", "parallel=tp4_pp2_dp4_cp2_ep1_zero1_vpp1_sp1"]
    ).run.name
    assert len(name) <= 40 and not name.endswith("-")


def test_the_result_is_frozen_and_goes_round_through_json():
    config = load(["cluster=h100x16384", "model=deepseek_v3"])
    with pytest.raises(AttributeError):
        config.train.steps = 3
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config


def test_whole_parts_can_be_given_and_taken_away():
    moe = load(["model.moe={experts: 8, top_k: 2, ffn_hidden: 64}", "model.moe.top_k=1"]).model.moe
    assert (moe.experts, moe.top_k, moe.ffn_hidden, moe.shared_ffn_hidden) == (8, 1, 64, 0)
    assert load(["model=mixtral_8x7b", "model.moe=null"]).model.moe is None
    assert load(["backend.options={a: 1, b: [x, 'y z']}"]).backend.options == {
        "a": 1,
        "b": ["x", "y z"],
    }
    level = "{name: one, nodes_per_switch: [1, 1], gbit_per_s: 3, latency_us: 1, source: here}"
    assert load([f"cluster.levels=[{level}]"]).cluster.levels[0].nodes_per_switch == [1, 1]


# ------------------------------------------------------------------------------------------- the
#     user's own folder


def test_the_users_files_come_first_from_a_folder_with_any_name(tmp_path):
    user = write(tmp_path / "a 'b' $(c) ü, d", train__mine=TRAIN, train__demo=TRAIN + "seed: 5\n")
    assert load(["train=mine"], user).train.steps == 10
    assert load([], user).train.seed == 5  # shadows conf/train/demo.yaml
    assert load(["model=gpt2"], user).model.name == "gpt2"  # shipped files are still there


def test_a_users_cluster_stands_on_a_shipped_one(tmp_path):
    lines = (
        "defaults:\n- h100x64\n- override /parallel@_global_.parallel: tp4_pp2_zero3\n-"
        " _self_\nname: mine\n"
    )
    config = load(["cluster=mine"], write(tmp_path, cluster__mine=lines))
    assert (config.cluster.name, config.cluster.nodes, config.cluster.gpu.memory_gib) == (
        "mine",
        8,
        79.6,
    )
    assert (config.parallel.tp, config.parallel.zero) == (
        4,
        3,
    )  # a word without a file, chosen by a file
    assert config.choices["parallel"] == "tp4_pp2_zero3"


def test_a_users_primary_file_is_used(tmp_path):
    primary = (shipped() / "orch.yaml").read_text().replace("cluster: local", "cluster: h100x8")
    assert load([], write(tmp_path, orch=primary)).cluster.name == "h100x8"


def test_conf_of_the_working_folder_is_used_and_its_config_yaml_left_alone(tmp_path, monkeypatch):
    """A project's own Hydra folder must not get in the way: its primary file is not ours."""
    write(tmp_path / "conf", train__mine=TRAIN, config="db: mysql\n", db__mysql="port: 3306\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / ".orch").touch()
    assert load(["train=mine"]).train.steps == 10
    assert folders() == [tmp_path / "conf", shipped()]
    assert "db" not in Library(folders()).groups()


def test_a_conf_folder_without_a_mark_belongs_to_the_users_own_program(tmp_path, monkeypatch):
    """Groups of the same name and `_target_` in them included; what it would give is said where it
    is asked for."""
    theirs = "_target_: my.model.Net\nlayers: 3\n"
    write(
        tmp_path / "conf",
        model__net=theirs,
        train__demo=theirs,
        optim__adamw=theirs,
        config="defaults: [model: net]\n",
    )
    monkeypatch.chdir(tmp_path)
    assert folders() == [shipped()]
    assert load([]) == load([], shipped())
    says = (
        r"there is no model 'net'; .*; ./conf has it, and is not marked as orch's: touch"
        r" conf/.orch, or"
    )
    with pytest.raises(OrchError, match=says) as refused:
        load(["model=net"])
    assert refused.value.exit == Exit.USAGE
    with pytest.raises(OrchError, match="_target_ would run code"):
        load(["model=net"], tmp_path / "conf")


@pytest.mark.parametrize("name", ["orch.yaml", "train/x.yaml"])
def test_a_pipe_among_the_files_is_refused_and_not_waited_for(tmp_path, name):
    (tmp_path / "train").mkdir()
    os.mkfifo(tmp_path / name)
    with pytest.raises(OrchError, match=f"{name} is not a regular file") as refused:
        load([], tmp_path)
    assert refused.value.exit == Exit.CONFIG


def test_two_loads_do_not_touch_each_other(tmp_path):
    user = write(tmp_path, train__mine=TRAIN)
    before = load([])
    load(["train=mine", "parallel=tp2"], user)
    assert load([]) == before


# ------------------------------------------------------------------------------------------- one
#     definition


def test_every_group_is_a_part_of_the_configuration():
    assert set(GROUPS) == set(fields(Config)) - {"run", "cost", "nodes", "nproc", "choices"}


def test_the_structured_config_has_exactly_the_schemas_keys():
    def compare(struct):
        assert list(config_dataclass(struct).__annotations__) == list(fields(struct))
        for field in fields(struct).values():
            if struct_of(field.type):
                compare(struct_of(field.type))

    compare(Config)
