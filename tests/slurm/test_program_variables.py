"""The variables of a program that Slurm starts, compared with those under a real torchrun."""

from __future__ import annotations

import json

import pytest

from tests.beds import program_variables
from tests.beds.program_variables import IN_FULL, PROGRAM, SHELL, of_a_login

from .test_runs import two_nodes

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow]

#: Variables that Slurm and its GPUs set, and those of this process that the list passes.
OF_THE_NODE = (
    "SLURM.*|SRUN_.*|ENVIRONMENT|CUDA_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ROCR_VISIBLE_DEVICES"
    "|ZE_AFFINITY_MASK|HOSTNAME|LOGNAME|MAIL|SHELL|USER|TERM|TMPDIR|TZ|LANG.*|LC_.*|PYTHON.*"
)


def test_two_nodes_of_two_ranks_have_what_torchrun_gives_and_the_rule_passes(orch, tmp_path):
    run = orch.submit(
        *two_nodes(), *IN_FULL, program=PROGRAM, shell={**SHELL, "OMP_NUM_THREADS": None}
    )
    run.wait("done")
    logs = [run.folder / "logs" / f"rank-{rank:05d}.log" for rank in range(4)]
    wrong = program_variables.differences(
        [program_variables.printed(log.read_text()) for log in logs],
        {"PATH": "/usr/bin:/bin", "HOME": "/root", **SHELL},
        tmp_path / "torchrun",
        nodes=2,
        dropped=("HF_TOKEN", "MY_OTHER"),
        own=f"{OF_THE_NODE}|{of_a_login()}",
    )
    assert not wrong, "\n".join(wrong)
    request = json.loads((run.folder / "request.json").read_text())
    assert "MY_TOKEN" in request["environment"]["names"]
    assert not program_variables.holders(tmp_path)
