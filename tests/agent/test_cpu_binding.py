"""Tests which cores a worker gets, by the files of machines that are made here, and what a real
worker is bound to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from msgspec import structs

from orchestrator.agent.node.cpu_binding import bind, device_visibility, format_cpu_list
from orchestrator.run.request import AGENT
from tests.beds.bundles import events, make_bundle, submitted, wait_end
from tests.beds.plans import make_plan

#: Two sockets with hyperthreads and four GPUs each, as in a DGX H100.
TWO_SOCKETS = {0: "0-55,112-167", 1: "56-111,168-223"}
EIGHT = dict(
    zip(["1b", "43", "52", "61", "9d", "c3", "d1", "df"], [0, 0, 0, 0, 1, 1, 1, 1], strict=True)
)
#: Eight domains, of which four have two GPUs each, as in a DGX A100.
NPS4 = {
    domain: f"{16 * domain}-{16 * domain + 15},{128 + 16 * domain}-{143 + 16 * domain}"
    for domain in range(8)
}
A100 = dict(
    zip(["07", "0f", "47", "4e", "87", "90", "b7", "bd"], [3, 3, 1, 1, 7, 7, 5, 5], strict=True)
)
#: Two Grace processors; the memories of GPUs are domains of their own, without cores.
GRACE = {0: "0-71", 1: "72-143"} | dict.fromkeys(range(2, 6), "")


def put(path: Path, file_text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(file_text + "\n")


def machine(
    root: Path, domains: dict[int, str], gpus: dict[str, int], models=(), distances=()
) -> Path:
    """The files of a machine. `gpus`: NUMA domain by PCI bus; `models`: of each, where they differ;
    `distances`: of each domain to all."""
    for domain, cores in domains.items():
        put(root / f"sys/devices/system/node/node{domain}/cpulist", cores)
    for domain, row in zip(domains, distances, strict=False):
        put(root / f"sys/devices/system/node/node{domain}/distance", row)
    for minor, (bus, domain) in enumerate(
        reversed(gpus.items())
    ):  # the minor number need not follow the bus
        about = (
            f"Model: \t\t {models[minor] if models else 'NVIDIA H100'}\nGPU UUID: \t"
            f" GPU-{bus}aa-1\n"
        )
        put(
            root / f"proc/driver/nvidia/gpus/0000:{bus}:00.0/information",
            f"{about}Device Minor: \t {minor}",
        )
        put(root / f"sys/bus/pci/devices/0000:{bus}:00.0/numa_node", str(domain))
        put(root / f"dev/nvidia{minor}", "")
    return root


def bound(
    root: Path, workers: int, environ=(), allowed=range(256), one_gpu_each=False
) -> list[str]:
    binding = bind(root, dict(environ), set(allowed), workers, one_gpu_each)
    return [*map(format_cpu_list, binding.cores), *([binding.reason] if binding.reason else [])]


def test_workers_get_the_cores_of_their_gpu_s_domain(tmp_path):
    root = machine(tmp_path, TWO_SOCKETS, EIGHT)
    assert bound(root, 8) == [TWO_SOCKETS[0]] * 4 + [TWO_SOCKETS[1]] * 4
    assert bound(root, 8, allowed=range(112)) == ["0-55"] * 4 + ["56-111"] * 4, (
        "of those that the job may use"
    )


@pytest.mark.parametrize(
    ("environ", "domains"),
    [
        ({"CUDA_VISIBLE_DEVICES": "5, 2"}, [1, 0]),
        ({"CUDA_VISIBLE_DEVICES": "7,6,-1,0"}, [1, 1]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-dfaa-1,GPU-1b"}, [1, 0]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-GPU-c3aa-1/7/0,MIG-GPU-43aa-1/7/0"}, [1, 0]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-0123,7"}, [None, 1]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-gone,7"}, [None, 1]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, [None, None]),
        ({"CUDA_VISIBLE_DEVICES": ""}, [None, None]),
        ({}, [None, None]),
    ],
)
def test_a_worker_s_gpu_is_the_one_that_it_sees(tmp_path, environ, domains):
    root = machine(tmp_path, TWO_SOCKETS, EIGHT)
    assert bound(root, 2, environ) == [TWO_SOCKETS.get(numa_domain, "") for numa_domain in domains]


def test_ranks_of_the_trainer_take_the_first_gpus_of_more(tmp_path):
    root = machine(tmp_path, TWO_SOCKETS, EIGHT)
    assert bound(root, 2, one_gpu_each=True) == [TWO_SOCKETS[0]] * 2
    assert bound(root, 9, one_gpu_each=True) == [""] * 9, "more than there are"


def test_domains_smaller_than_a_socket_and_domains_without_cores(tmp_path):
    root = machine(tmp_path / "a100", NPS4, A100)
    assert bound(root, 8) == [NPS4[domain] for domain in (3, 3, 1, 1, 7, 7, 5, 5)]
    near = [
        "10 40 20 20 80 80",
        "40 10 80 80 20 20",
        *["80 80 80 80 80 80"] * 2,
        *["80 20 80 80 80 80"] * 2,
    ]
    root = machine(tmp_path / "gb200", GRACE, {"01": 0, "02": 3, "03": 4, "04": 5}, distances=near)
    assert bound(root, 4) == ["0-71", "0-71", "72-143", "72-143"]


def test_one_domain_and_a_machine_that_knows_none_bind_nobody(tmp_path):
    assert bound(machine(tmp_path / "one", {0: "0-63"}, {"07": 0, "0f": 0}), 2) == ["", ""]
    assert bound(machine(tmp_path / "vm", TWO_SOCKETS, {"07": -1, "0f": -1}), 2) == ["", ""]
    assert bound(machine(tmp_path / "memory", {0: "0-71", 1: ""}, {"07": 0}), 1) == [""]
    assert bound(tmp_path / "nothing", 2) == ["", ""]


def test_what_a_cgroup_denies_is_no_gpu_of_this_job(tmp_path, monkeypatch):
    root = machine(tmp_path, TWO_SOCKETS, EIGHT)
    granted = {root / "dev/nvidia0", root / "dev/nvidia1"}  # the last two of the bus
    monkeypatch.setattr(os, "access", lambda path, mode: path in granted)
    assert bound(root, 2) == [TWO_SOCKETS[1]] * 2
    assert bound(root, 2, {"CUDA_VISIBLE_DEVICES": "1,0"}) == [TWO_SOCKETS[1]] * 2


def test_numbers_say_nothing_where_cuda_orders_gpus_by_their_speed(tmp_path):
    root = machine(tmp_path, TWO_SOCKETS, {"07": 0, "87": 1}, models=["NVIDIA A100", "NVIDIA L4"])
    assert bound(root, 2) == ["", ""]
    assert bound(root, 2, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) == [TWO_SOCKETS[0], TWO_SOCKETS[1]]
    assert bound(root, 2, {"CUDA_VISIBLE_DEVICES": "GPU-87,GPU-07"}) == [
        TWO_SOCKETS[1],
        TWO_SOCKETS[0],
    ]


def test_cores_that_lie_elsewhere_are_no_reason_to_crowd(tmp_path):
    root = machine(tmp_path, TWO_SOCKETS, EIGHT)
    far = "4 of 8 workers have a GPU of NUMA domain 1, where this job may use"
    assert bound(root, 8, allowed=range(32)) == ["0-31"] * 4 + [""] * 4 + [
        f"{far} 0 of its 32 cores"
    ]
    assert bound(root, 8, allowed=range(60)) == ["0-55"] * 4 + [""] * 4 + [
        f"{far} 4 of its 60 cores"
    ]
    assert bound(root, 8, allowed=range(72)) == ["0-55"] * 4 + ["56-71"] * 4


@pytest.mark.parametrize(
    "name", ["OMP_PROC_BIND", "OMP_PLACES", "KMP_AFFINITY", "GOMP_CPU_AFFINITY"]
)
def test_a_program_that_binds_its_threads_itself_is_left_alone(tmp_path, name):
    root = machine(tmp_path, TWO_SOCKETS, EIGHT)
    assert bound(root, 8, {name: "close"}) == [""] * 8 + [f"{name} is set"]
    assert bound(root, 8, {name: "false"})[0] == TWO_SOCKETS[0]


def test_the_plan_s_gpus_are_counted_among_those_that_the_agent_sees():
    assert (
        device_visibility({}, [0, 1])
        == device_visibility({"CUDA_VISIBLE_DEVICES": "4,5"}, [0, 1])
        == {}
    )
    assert device_visibility({}, [1, 3]) == {"CUDA_VISIBLE_DEVICES": "1,3"}
    assert device_visibility({"CUDA_VISIBLE_DEVICES": "4, 5,GPU-a,7"}, [1, 2]) == {
        "CUDA_VISIBLE_DEVICES": "5,GPU-a"
    }
    assert device_visibility({"CUDA_VISIBLE_DEVICES": "4"}, [1]) == {}


AGENT_THERE = "import sys, pathlib; from orchestrator.agent.__main__ import main; "
AGENT_THERE += "sys.exit(main(sys.argv[2:], root=pathlib.Path(sys.argv[1])))"


@pytest.mark.process
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.parametrize("numa_binding", [True, False])
def test_a_worker_and_its_children_run_on_the_cores_of_its_gpu(runs, tmp_path, numa_binding):
    *_, last = sorted(os.sched_getaffinity(0))
    root = machine(tmp_path / "machine", {0: f"0-{last - 1}", 1: str(last)}, {"07": 1})
    child = "import os; print('child', sorted(os.sched_getaffinity(0)))"
    program = (
        "import os, subprocess, sys; print('worker', sorted(os.sched_getaffinity(0)), flush=True); "
    )
    program += f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    bundle = make_bundle(
        make_plan(),
        runs,
        command=[sys.executable, "-c", program],
        backend={"numa_binding": numa_binding},
        names=["PATH"],
    )
    [agent] = bundle.request.agents
    argv = [
        sys.executable,
        "-c",
        AGENT_THERE,
        str(root),
        *agent.argv[agent.argv.index(AGENT) + 1 :],
    ]
    request = structs.replace(bundle.request, agents=[structs.replace(agent, argv=argv)])
    folder = submitted(structs.replace(bundle, request=request))
    assert wait_end(folder).state == "done"
    cores = [last] if numa_binding else sorted(os.sched_getaffinity(0))
    assert folder.rank_log(0).read_text().splitlines() == [f"worker {cores}", f"child {cores}"]
    assert [event["cores"] for event in events(folder, "workers_bound")] == (
        [{str(last): [0]}] if numa_binding else []
    )
