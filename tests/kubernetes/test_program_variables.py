"""The variables of a program in pods, compared with those under a real torchrun."""

from __future__ import annotations

import base64
import json

import pytest

from tests.beds import program_variables
from tests.beds.program_variables import IN_FULL, PROGRAM, SECRETS, SHELL

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow]

#: Variables that the image, the pod and orch's process 1 set.
OF_THE_POD = "HOME|TMPDIR|USER|LOGNAME|HOSTNAME|LANG.*|LC_.*|TZ|TERM|PYTHON.*|KUBERNETES_.*|JOB_.*"


@pytest.mark.full
def test_two_pods_of_two_ranks_have_what_torchrun_gives_and_the_rule_passes(orch, tmp_path):
    words = ("cluster=local", "cluster.nodes=2", "cluster.gpus_per_node=2", "parallel=tp2_zero1")
    shell = {**SHELL, "OMP_NUM_THREADS": None}
    run = orch.submit(*words, *IN_FULL, "--", *PROGRAM, env=shell)
    run.wait("done")
    logs = [run.inside / "logs" / f"rank-{rank:05d}.log" for rank in range(4)]
    wrong = program_variables.differences(
        [program_variables.printed(log.read_text()) for log in logs],
        {"PATH": "/usr/bin:/bin", "HOME": "/tmp", **SHELL},
        tmp_path / "torchrun",
        nodes=2,
        dropped=("HF_HOME", "HF_TOKEN", "MY_OTHER"),
        own=OF_THE_POD,
    )
    assert not wrong, "\n".join(wrong)
    for folder in (tmp_path, run.inside):
        assert not program_variables.holders(folder)
    kinds = "configmaps,jobs,pods,services,events"
    objects = json.dumps(orch.bed.get(kinds, "-n", orch.namespace))
    assert run.id in objects and not any(value in objects for value in SECRETS.values())
    secret = orch.bed.get("secret", "-n", orch.namespace, "-l", f"orch.dev/run={run.id}")
    (encoded,) = [item["data"]["environment.json"] for item in secret["items"]]
    environment = json.loads(base64.b64decode(encoded))
    assert environment["MY_TOKEN"] == SECRETS["MY_TOKEN"] and "HF_TOKEN" not in environment
