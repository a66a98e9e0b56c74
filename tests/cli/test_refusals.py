"""Wrong command lines and wrong files, each with its one-line message and exit code; more in
tests/golden."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.cli.main import main
from orchestrator.plan.exits import Exit
from orchestrator.plan.trained import NOT_RUN

U = Exit.USAGE
C = Exit.CONFIG
S = Exit.SECURITY
#: A model that the bundled trainer does not train on the next token.
NOT_CAUSAL = "model=bert_large train.objective=next_token"

WRONG_LINES = [
    # verbs and flags
    ("pln", U, "unknown verb 'pln'; did you mean 'plan'?"),
    ("PLAN", U, "unknown verb 'PLAN'; did you mean 'plan'?"),
    ("--jsn", U, "unknown verb '--jsn'"),
    ("plan --jsno", U, "no flag --jsno; did you mean '--json'?"),
    ("plan --out", U, "--out: expected one argument"),
    ("plan --out /nonexistent/x.json", U, "--out /nonexistent/x.json: No such file or directory"),
    ("plan --config-dir /dev/null", U, "is not a folder"),
    ("plan h100x64", U, "'h100x64' is not key=value"),
    ("plan submit", U, "did you mean the verb 'submit'?"),
    ("completion", U, "name a shell: bash, fish, zsh"),
    ("config --choices clustr", U, "unknown group 'clustr'; did you mean 'cluster'?"),
    ("config --choices model train.steps=3", U, "'train.steps=3': --choices takes no overrides"),
    ("precision --batches 0", U, "--batches 0: from 1 to 64"),
    ("precision a-run model=tiny", U, "'model=tiny': a run has its own configuration"),
    ("precision model=tiny --out map.png", U, "--out map.png: the file must end in .html"),
    ("precision model=tiny train.matmul=fp8_row", C, "fp8_row: the trainer does not run it"),
    # groups
    ("plan +cluster=", U, "cluster= needs the name of a file; choices: a100x64"),
    ("plan clustr=local", U, "unknown group or key 'clustr'; did you mean 'cluster'?"),
    ("plan model=llama3-70b", U, "did you mean 'llama3_70b'?"),
    ("plan model=gpt2,tiny", U, "one at a time"),
    ("plan cluster/nod=dgx_h100", U, "unknown group 'cluster/nod'; did you mean 'cluster/node'?"),
    ("plan cluster=../../etc/passwd", U, "there is no cluster '../../etc/passwd'"),
    ("plan model@other=gpt2", U, "write model=<file>"),
    ("plan cluster/node=dgx_h100", U, "cluster/node=...: the chosen cluster has no such choice"),
    ("plan ~model", U, "keys cannot be deleted"),
    ("plan hydra.run.dir=/tmp", U, "Hydra's own settings are not used"),
    ("plan data=text", U, "data.paths must be given: data.paths=..."),
    # parallelism specs
    ("plan parallel=fsdpp", U, "did you mean 'fsdp'?"),
    # keys
    ("plan train=5", U, "there is no train '5'"),
    ("plan run=5", U, "run holds keys of its own; set one, like run.name=..."),
    ("plan cluster.gpu=h100", U, "cluster.gpu holds keys of its own"),
    ("plan train.steps.more=5", U, "train.steps is a single value"),
    ("plan cluster.levels.7.gbit_per_s=1", U, "there is no such item in the list"),
    ("plan model.moe.experts=8", U, "model.moe is null in this model; set it whole"),
    ("plan model.moe=8", U, "model.moe holds keys of its own; set one, like model.moe.experts=..."),
    ("plan model.moe={experts:8}", U, "model.moe.top_k must be given a value"),
    ("plan model.moe={expert:8}", U, "unknown key; did you mean 'experts'?"),
    (
        "plan cluster.levels=[{name:a}]",
        U,
        "cluster.levels.0.nodes_per_switch must be given a value",
    ),
    ("plan choices.model=x", U, "unknown group or key 'choices'"),
    ("plan =3", U, "'=3' is not key=value"),
    # values
    ("plan train.steps=2.5", U, "must be a whole number, not '2.5'"),
    ("plan train.steps=0", U, "must be a whole number >= 1, not 0"),
    ("plan train.steps=", U, "must be a whole number"),
    ("plan train.steps=null", U, "train.steps cannot be null"),
    ("plan train.steps=1,2", U, "one value at a time"),
    ("plan train.steps=[1", U, "cannot be read"),
    ("plan train.seed=99999999999999999999", U, "larger than 2**53"),
    (
        "plan train.precision=bf61",
        U,
        "'bf61' is not legal; did you mean 'bf16'? choices: fp64, fp32, bf16, fp16",
    ),
    ("plan optim.lr=-1", U, "must be a number > 0, not -1.0"),
    ("plan optim.lr=nan", U, "must be a finite number, not nan"),
    ("plan parallel.bucket_mib=1e308", U, "must be a number <= 1000000000, not 1e+308"),
    ("plan parallel.bucket_mib=1e-7", U, "must be a number >= 1e-06, not 1e-07"),
    ("plan cluster=h100x64 cluster.gpu.memory_gib=1e308", U, "must be a number <= 1000000000"),
    ("plan cluster=h100x64 cluster.gpu.memory_gib=1e-300", U, "must be a number >= 1e-06"),
    ("plan optim.beta1=1", U, "must be a number < 1, not 1.0"),
    ("plan metrics.port=70000", U, "must be a whole number <= 65535, not 70000"),
    ("plan data.paths=/corpus", U, "data.paths is a list, write data.paths=[/corpus]"),
    ("plan data.paths=[]", U, "must be a list of length >= 1"),
    ("plan parallel.order=[tp,pp]", U, "must name each of tp, cp, ep, pp, dp once"),
    ("plan cluster.gpu.peak_tflops.fp65=3", U, "'fp65' is not legal; did you mean 'fp64'?"),
    ("plan run.name=My_Run", U, "must be 1 to 40 of a-z 0-9 -"),
    (
        "plan parallel=auto model=mixtral_8x7b cluster=h100x8 train.matmul=fp8_tensor",
        C,
        "train.matmul=fp8_tensor: the trainer's experts have 8 bits on CPUs only",
    ),
    (
        "plan parallel=auto cluster=h100x8 train.matmul=fp8_block",
        C,
        "train.matmul=fp8_block: the trainer has blocks on CPUs only",
    ),
    (
        "plan train.matmul=fp8_tensor train.matmul_wide=[dwn]",
        C,
        "train.matmul_wide=[dwn]: tiny has no linear 'dwn'; did you mean 'down'? choices: wq, wk",
    ),
    ("plan train.matmul_wide=[wo]", C, "keeps linears wide while train.matmul narrows the others"),
    (
        "plan parallel=auto train.matmul=fp8_row",
        C,
        "the trainer does not run it yet; legal: fp8_tensor, fp8_delayed, fp8_block",
    ),
    (
        "plan parallel=auto train.grad_dtype=fp16",
        C,
        "train.grad_dtype=fp16 with fp32: legal is fp32",
    ),
    (
        "plan parallel=auto train.grad_wire=fp16",
        C,
        "train.grad_wire=fp16 with train.precision=fp32: legal is bf16 with fp32",
    ),
    ("plan parallel=auto train.precision=fp64", C, "with fp64: legal is fp64"),
    ("plan model.heads=7", U, "heads 7 is not a multiple of kv_heads 4"),
    (
        "plan train.global_batch_tokens=1000",
        U,
        "must be a multiple of train.seq_len 128; the nearest is 1024",
    ),
    (
        "plan train.global_batch_tokens=1024 train.global_batch_samples=8",
        U,
        "exactly one; both are set",
    ),
    # code and secrets
    ("plan train._target_=os.system", S, "_target_ would run code"),
    ("plan data.tokenizer=${oc.env:HOME}", S, "the resolver 'oc.env' is not allowed"),
    ("plan data.tokenizer=${${run.name}:HOME}", S, "is not allowed"),
    ("plan data.tokenizer=${nothing}", U, "Interpolation key 'nothing' not found"),
    ("submit +cluster=local run.dir=~nobody-here/runs --dry-run", C, "is no user 'nobody-here'"),
    # what the bundled trainer does not run
    (f"submit +cluster=local {NOT_CAUSAL} parallel=tp2 run.allow_oom=true", C, NOT_RUN),
    (
        f"submit +cluster=local {NOT_CAUSAL} parallel=tp2,tp4 --multirun --dry-run",
        C,
        f"parallel=tp2: {NOT_RUN}",
    ),
    (
        f"submit cluster=local parallel=auto {NOT_CAUSAL}",
        C,
        "is not causal: tokens would see the next one",
    ),
    (
        f"plan +cluster=h100x64 parallel=auto {NOT_CAUSAL}",
        C,
        "--any searches layouts for another program",
    ),
    (f"tune +cluster=h100x64 {NOT_CAUSAL}", C, "--any searches layouts for another program"),
    (
        f"whatif +cluster=h100x64 parallel=auto {NOT_CAUSAL}",
        C,
        "--any searches layouts for another program",
    ),
]


def assert_one_line(err: str) -> None:
    assert err.startswith("orch: error: ") and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    ("line", "code", "message"), WRONG_LINES, ids=[line for line, _, _ in WRONG_LINES]
)
def test_wrong_command_line(capsys, line, code, message):
    assert main(line.split(" ")) == code
    out, err = capsys.readouterr()
    assert message in err and out == ""
    assert_one_line(err)


@pytest.mark.parametrize(
    "line",
    [
        f"plan +cluster=local {NOT_CAUSAL} parallel=tp2",
        f"submit --dry-run +cluster=local {NOT_CAUSAL} parallel=tp2 -- python x.py",
        "submit --dry-run +cluster=h100x64 model=mixtral_8x7b parallel=auto -- python x.py",
        "plan --any +cluster=h100x64 model=mixtral_8x7b parallel=auto",
        "tune --any +cluster=h100x64 model=mixtral_8x7b",
    ],
)
def test_what_the_bundled_trainer_does_not_run_is_for_programs_of_ones_own(capsys, line):
    """`orch plan` shows it with a warning; for another program it is sent and searched without
    one."""
    assert main(line.split(" ")) == Exit.DONE
    out, _ = capsys.readouterr()
    assert (NOT_RUN in " ".join(out.split())) == line.startswith("plan +")


BASE = "steps: 10\nseq_len: 8\nglobal_batch_samples: 8\n"
H100 = "defaults:\n- h100x64\n- _self_\n"
OVERRIDE = "defaults:\n- h100x64\n- override "

WRONG_FILES = [
    ("train", BASE + "stepz: 3\n", C, r"train\.stepz: unknown key; did you mean 'steps'\?"),
    ("train", BASE + "seed: 1.5\n", C, r"train\.seed: must be a whole number, not '1\.5'"),
    ("train", BASE + "seed: null\n", C, r"train\.seed: cannot be null"),
    ("train", BASE + "seed: -3\n", C, r"train\.seed: must be a whole number >= 0, not -3"),
    (
        "train",
        BASE + "precision: 16\n",
        C,
        r"train\.precision: 16 is not legal; did you mean 'fp16'\?",
    ),
    (
        "train",
        BASE + "clip_grad_norm: .inf\n",
        C,
        r"train\.clip_grad_norm: must be a finite number",
    ),
    ("train", BASE + "seed: [1\n", C, r"mine\.yaml:5: not YAML"),
    ("train", BASE + "steps: 3\n", C, r"mine\.yaml:4: not YAML: found duplicate key steps"),
    ("train", BASE + "\tseed: 1\n", C, r"mine\.yaml:4: not YAML"),
    ("train", BASE + "seed: ${x\n", C, r"an interpolation that cannot be read"),
    ("train", BASE + "seed: ${nokey}\n", C, r"train\.seed: Interpolation key 'nokey' not found"),
    ("train", BASE + "global_batch_tokens: 64\n", C, r"exactly one; both are set"),
    ("train", "", C, r"train\.steps: is not set, and has no default"),
    ("train", "- a\n- b\n", C, r"must hold keys and values"),
    ("train", "hello", C, r"train\.hello: unknown key"),
    ("train", b"\xff\xfe\x00", C, r"mine\.yaml: not UTF-8"),
    ("train", "defaults:\n- nope\n" + BASE, C, r"there is no train 'nope'; choices: demo"),
    ("train", BASE + "_target_: os.system\n", S, r"_target_ would run code"),
    (
        "train",
        BASE + "seed: ${oc.env:HOME}\n",
        S,
        r"train\.seed: the resolver 'oc\.env' is not allowed",
    ),
    ("cluster", "name: mine\n", C, r"cluster\.device: is not set, and has no default"),
    ("cluster", H100 + "name: 'a b'\n", C, r"cluster\.name: must be 1 to 63 of A-Z"),
    ("cluster", H100 + "name: 1e5\n", C, r"cluster\.name: must be text, not 100000\.0"),
    ("cluster", H100 + "gpu: 3\n", C, r"must hold keys and values"),
    ("cluster", H100 + "levels: 3\n", C, r"cluster\.levels: must be a list"),
    ("cluster", H100 + "levels: []\n", C, r"cluster\.levels: needs at least one level"),
    (
        "cluster",
        H100 + "levels: [{name: x, gbit: 4}]\n",
        C,
        r"gbit: unknown key; did you mean 'gbit_per_s'\?",
    ),
    ("cluster", H100 + "levels: [{name: x}]\n", C, r"nodes_per_switch: is not set"),
    (
        "cluster",
        H100 + "gpu: {peak_tflops: {fp65: 3}}\n",
        C,
        r"peak_tflops\.fp65: 'fp65' is not legal",
    ),
    ("cluster", H100 + "nvlink: {source: ''}\n", C, r"cluster\.nvlink\.source: must be"),
    ("cluster", H100 + "nodes: 7\n", C, r"."),
    (
        "cluster",
        OVERRIDE + "/parallel@_global_.parallel: tp4_tp4\n",
        C,
        r"mine\.yaml: .*tp is given",
    ),
    ("cluster", OVERRIDE + "/model@_global_.model: gpt5\n", C, r"there is no model 'gpt5'"),
    (
        "backend",
        "name: mine\noptions: {a: {_target_: os.system}}\n",
        S,
        r"backend\.options\.a: _target_ would run",
    ),
    (
        "backend",
        'name: mine\noptions: {a: [1, {b: "x\\ny"}]}\n',
        C,
        r"backend\.options\.a\.1\.b: holds the unprint",
    ),
    ("backend", "name: mine\nenv: {'A B': x}\n", C, r"backend\.env\.A B: must be a name of"),
    ("backend", "name: mine\nenv: {A: 3}\n", C, r"backend\.env\.A: must be text, not 3"),
    (
        "model",
        "defaults:\n- tiny\n- _self_\nkv_heads: 3\n",
        C,
        r"heads 8 is not a multiple of kv_heads 3",
    ),
    (
        "model",
        "defaults:\n- mixtral_8x7b\n- _self_\nmoe: {top_k: 9}\n",
        C,
        r"model\.moe\.top_k: 9 is more than the 8",
    ),
    (
        "model",
        "defaults:\n- mixtral_8x7b\n- _self_\nmoe: {groups: 3}\n",
        C,
        "3 groups do not divide 8 experts",
    ),
    (
        "model",
        "defaults:\n- mixtral_8x7b\n- _self_\nmoe: {groups: 8}\n",
        C,
        "more than the 1 experts of 1 groups",
    ),
    (
        "model",
        "defaults:\n- mixtral_8x7b\n- _self_\nmoe: {top_groups: 2}\n",
        C,
        "more than the 1 groups",
    ),
    (
        "model",
        "defaults:\n- mixtral_8x7b\n- _self_\nmoe: {routed_scale: 0}\n",
        C,
        "must be positive, not 0",
    ),
    ("model", "defaults:\n- mixtral_8x7b\n- _self_\nmoe: {score: max}\n", C, r"model\.moe\.score"),
    (
        "model",
        "defaults:\n- tiny\n- _self_\nmtp: {depth: -1}\n",
        C,
        r"model\.mtp\.depth: must be 0 or positive, not -1",
    ),
    (
        "model",
        "defaults:\n- tiny\n- _self_\nmtp: {depth: 1, weight: -2}\n",
        C,
        r"mtp\.weight: must be 0 or positive",
    ),
    (
        "model",
        "defaults:\n- tiny\n- _self_\nmtp: {dept: 1}\n",
        C,
        r"dept: unknown key; did you mean 'depth'",
    ),
]


@pytest.mark.parametrize(
    ("group", "content", "code", "message"),
    WRONG_FILES,
    ids=[f"{g}-{t!r:.40}" for g, t, _, _ in WRONG_FILES],
)
def test_wrong_file(capsys, tmp_path: Path, group, content, code, message):
    path = tmp_path / group / "mine.yaml"
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["plan", f"{group}=mine", "--config-dir", str(tmp_path)]) == code
    err = capsys.readouterr().err
    assert re.search(message, err), err
    assert_one_line(err)
    assert "mine.yaml" in err or message == "."


def test_a_working_folder_that_is_gone_is_said(tmp_path, monkeypatch, capsys):
    deleted_folder = tmp_path / "gone"
    deleted_folder.mkdir()
    monkeypatch.chdir(deleted_folder)
    deleted_folder.rmdir()
    assert main(["plan"]) == Exit.USAGE
    assert (
        capsys.readouterr().err
        == "orch: error: the working folder has been deleted: change into another one\n"
    )


@pytest.mark.parametrize("cluster", ["local", "h100x8", "v100x400"])
def test_the_refusal_of_fp64_names_the_words_that_allow_it(capsys, cluster):
    arguments = ["plan", f"cluster={cluster}", "model=tiny", "parallel=tp2", "train.precision=fp64"]
    assert main(arguments) == C
    fp64_overrides = capsys.readouterr().err.rpartition("to verify in fp64, ")[2].split()
    assert len(fp64_overrides) == 2 and main([*arguments, *fp64_overrides]) == 0
    assert "best ever measured" not in capsys.readouterr().out
