"""The launch request: pure, complete, without secrets, and the same bytes shown and sent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backends.local import backend as local
from orchestrator.backends.local.backend import LocalBackend
from orchestrator.config.schema import BackendSpec
from orchestrator.errors import OrchError
from orchestrator.run.environment import Environment, compose_environment
from orchestrator.run.request import (
    HIDDEN,
    Code,
    check_contents,
    from_bytes,
    frozen_config,
    redacted,
    to_bytes,
    used_nodes,
)
from orchestrator.run.variables import is_secret_name
from tests.beds.bundles import make_bundle
from tests.beds.plans import make_plan

PLAN = make_plan(tp=2, dp=2, nodes=2)
RUNS = Path("/home/user/.orch/runs")


def test_the_same_input_gives_the_same_bytes_and_they_survive():
    first = make_bundle(PLAN, RUNS).request
    second = make_bundle(PLAN, RUNS).request
    assert to_bytes(first) == to_bytes(second)
    assert from_bytes(to_bytes(first)) == first


def test_agents_are_argument_lists_with_explicit_identities():
    names = ["a b", "$(reboot)", "; rm -rf", "new\nline"]
    request = make_bundle(make_plan(dp=4, node_names=names), RUNS).request
    assert [agent.node for agent in request.agents] == names
    for agent in request.agents:
        assert agent.argv[agent.argv.index("--node") + 1] == agent.node


def test_a_node_without_ranks_gets_no_agent():
    plan = make_plan(dp=2, nodes=2)
    cluster = msgspec.structs.replace(plan.cluster, node_names=["spare", *plan.cluster.node_names])
    assert used_nodes(msgspec.structs.replace(plan, cluster=cluster)) == ["node0", "node1"]


def test_contents_are_tied_to_the_request():
    bundle = make_bundle(PLAN, RUNS)
    check_contents(bundle)
    spoiled = msgspec.structs.replace(bundle, contents={**bundle.contents, "plan.json": b"{}"})
    with pytest.raises(ValueError, match=r"content of plan\.json"):
        check_contents(spoiled)


@given(
    st.lists(st.text(st.characters(exclude_characters="\0"), max_size=40), min_size=1, max_size=6)
)
def test_the_users_words_arrive_byte_exact(argv):
    request = from_bytes(to_bytes(make_bundle(PLAN, RUNS, command=argv).request))
    assert request.worker.argv == argv


def test_arguments_that_no_process_or_request_can_hold_are_refused():
    with pytest.raises(OrchError, match="argument 1 of the program holds a NUL"):
        make_bundle(PLAN, RUNS, command=["a", "b\0c"])
    with pytest.raises(OrchError, match="argument 1 of the program is not UTF-8"):
        make_bundle(PLAN, RUNS, command=["a", "caf\udce9"])


def test_only_allowed_variables_pass_and_only_by_name():
    shell = [
        "PATH",
        "HOME",
        "NCCL_DEBUG",
        "LC_ALL",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "EDITOR",
        "NCCL_AUTH_TOKEN",
    ]
    request = make_bundle(PLAN, RUNS, names=shell).request
    assert request.environment.names == ["HOME", "LC_ALL", "NCCL_DEBUG", "PATH"]


def test_a_secret_in_the_configuration_is_refused():
    with pytest.raises(OrchError, match=r"backend\.env\.HF_TOKEN looks like a secret") as refused:
        make_bundle(PLAN, RUNS, env={"HF_TOKEN": "hf_abc"})
    assert refused.value.exit == 78 and "hf_abc" not in refused.value.message


@pytest.mark.parametrize("name", ["A=B", "1A", "A B", "A\nB", "", "A$B", "Ä", "x" * 300])
def test_a_bad_variable_name_is_refused(name):
    with pytest.raises(OrchError, match="not the name of a variable"):
        make_bundle(PLAN, RUNS, env={name: "x"})


def test_the_composed_environment_has_pythons_folder_first_and_nothing_else():
    first = {"path_first": ["/venv/bin"], "python_path_first": ["/code"]}
    environment = Environment(names=["PATH", "HOME"], values={"A": "1"}, **first)
    shell = {"PATH": "/bin:/venv/bin:/usr/bin", "HOME": "/h", "SECRET": "s", "PYTHONPATH": "/mine"}
    expected = {"PATH": "/venv/bin:/bin:/usr/bin", "HOME": "/h", "A": "1", "PYTHONPATH": "/code"}
    assert compose_environment(environment, shell) == expected


SECRET = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "db-password", "AUTH", "apikey"]
SECRET += [
    "PGPASSWORD",
    "MYSQL_PWD",
    "GH_PAT",
    "ACCESSKEY",
    "GITHUBTOKEN",
    "AWSSECRETKEY",
    "SSHPASS",
    "db.pwd",
]
HARMLESS = ["tokenizer", "global_batch_tokens", "tokens_per_s", "keep_last", "kv_heads", "author"]
HARMLESS += ["PWD", "OLDPWD", "pattern", "path", "monkey", "patch", "max_tokens", "bypass"]


@pytest.mark.parametrize("name", SECRET + HARMLESS)
def test_secret_names(name):
    assert is_secret_name(name) == (name in SECRET)


def test_redaction_reaches_every_depth():
    shown = redacted(
        {
            "a": [{"api_key": "x", "n": 1}],
            "token": {"b": "y"},
            "password": None,
            "tokens": ["p", "q"],
        }
    )
    plain = {"token": {"b": "y"}, "password": None}
    assert shown == {"a": [{"api_key": HIDDEN, "n": 1}], "tokens": [HIDDEN, HIDDEN], **plain}


def test_credentials_in_a_url_are_redacted_and_ports_stay():
    redacted_tree = redacted(
        {"store": "postgres://me:pw@host:80/db, http://host:80/a@b", "n": [1, "s3://bucket/a@b"]}
    )
    assert redacted_tree == {
        "store": f"postgres://{HIDDEN}@host:80/db, http://host:80/a@b",
        "n": [1, "s3://bucket/a@b"],
    }


def test_the_frozen_configuration_is_redacted():
    raw = frozen_config(BackendSpec(name="slurm", options={"account": "me", "api_token": "hush"}))
    assert b"hush" not in raw and b"account: me" in raw


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"[]", b'{"schema": "orch.request/9"}', b'{"\xed": 1}', b"[" * 100_000]
)
def test_a_damaged_request_is_one_line(raw):
    with pytest.raises(OrchError) as refused:
        from_bytes(raw)
    assert refused.value.exit == 65


def test_a_gpu_cluster_is_refused_here_naming_what_is_here(monkeypatch):
    monkeypatch.setattr(local, "gpus_here", lambda: 0)
    gpus = {"device": "cuda", "cluster": "h100x64", "gpus_per_node": 8}
    request = msgspec.structs.replace(make_bundle(PLAN, RUNS).request, **gpus)
    with pytest.raises(
        OrchError, match=r"h100x64 is 2 nodes of 8 GPUs; this machine has no GPU, \d+ CPUs"
    ) as refused:
        LocalBackend().check(request)
    assert refused.value.exit == 76
    monkeypatch.setattr(local, "gpus_here", lambda: 8)
    LocalBackend().check(msgspec.structs.replace(request, nodes=1))


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (["no-such-program"], "program 'no-such-program' is not on PATH"),
        (["./missing.sh"], "program './missing.sh' does not exist"),
        (["./notes.txt"], "program './notes.txt' is not executable"),
        (["python", "missing.py"], "script 'missing.py' is not in"),
        (["python3", "ignored.py"], "git ignores it"),
    ],
)
def test_a_program_that_cannot_run_is_refused_at_once(tmp_path, command, complaint):
    work = tmp_path / "work"
    work.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=work, check=True)
    for name, content in ((".gitignore", "ignored.py\n"), ("ignored.py", ""), ("notes.txt", "")):
        (work / name).write_text(content)
    bundle = make_bundle(
        PLAN, tmp_path / "runs", command=command, code=Code(kind="git", root=str(work))
    )
    with pytest.raises(OrchError, match=complaint) as refused:
        LocalBackend().submit(bundle, os.environ)
    assert refused.value.exit == 64
    assert sys.executable in bundle.request.agents[0].argv


def test_golden():
    """The whole request of a small plan, as it was last agreed on. Delete the file to have it
    written anew."""
    golden = Path(__file__).with_name("golden") / "request.json"
    code = Code(kind="git", root="/home/user/project", subfolder="sub", commit="c" * 40)
    plan = make_plan(tp=2, dp=2, nodes=2)
    bundle = make_bundle(plan, RUNS, run_id="tiny-1", command=["python", "my_train.py"], code=code)
    request_text = to_bytes(bundle.request).decode().replace(sys.executable, "/venv/bin/python")
    request_text = request_text.replace(str(Path(sys.executable).parent), "/venv/bin").replace(
        plan.hash, "<plan hash>"
    )
    for file in bundle.request.files:
        if file.sha256:
            request_text = request_text.replace(file.sha256, f"<sha256 of {file.path}>").replace(
                f'"size": {file.size}', '"size": 0'
            )
    if not golden.exists():
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(request_text)
        pytest.fail(f"{golden} was written anew: look at it, and run again")
    assert request_text == golden.read_text()
