"""The run's NetworkPolicy, where something enforces it: who reaches its pods, and whom they
reach."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.beds.kubernetes import addons, bed_conf, image
from tests.beds.kubernetes.bed import Bed, Shape
from tests.beds.kubernetes.runs import SHORT, TINY, USER, Orch

from .conftest import bring_up

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow, pytest.mark.full]
PORT = 8000  # on which the stranger listens
#: Says whether a connection is made.
REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=4).close()
    print("reached")
except OSError:
    print("not reached")
"""


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with bring_up(Shape(nodes=1), "kube-network-policies") as started_bed:
        addons.network_policies(started_bed)
        yield started_bed


@pytest.fixture
def orch(bed, tmp_path) -> Iterator[Orch]:
    with Orch.in_new_namespace(bed, tmp_path) as home:
        yield home


def stranger(orch: Orch) -> str:
    """A pod of the same namespace that is no run's; its name."""
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": "c", "image": image.NAME, "imagePullPolicy": "Never", "securityContext": security,
                 "command": ["python3", "-m", "http.server", str(PORT)]}  # fmt: skip
    pod_security = {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    about = {"name": "stranger", "namespace": orch.namespace}
    orch.bed.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": about,
            "spec": {"containers": [container], "securityContext": pod_security},
        }
    )
    orch.bed.kubectl(
        "wait",
        "-n",
        orch.namespace,
        "--for=condition=Ready",
        "pod/stranger",
        "--timeout=120s",
        timeout=150,
    )
    return "stranger"


def reaches(orch: Orch, pod: str, host: str, port: int) -> bool:
    probe_output = orch.bed.kubectl(
        "exec", "-n", orch.namespace, pod, "--", "python3", "-c", REACH, host, str(port)
    )
    return probe_output.strip() == "reached"


@pytest.mark.parametrize("egress", [None, [], [{"cidr": bed_conf.PODS, "ports": [PORT]}]])
def test_only_those_reach_each_other_who_may(orch, egress):
    """Strangers see the metrics and no other port; outwards pods reach one another, DNS, and what
    is named."""
    options = {"network_policy": True, **({} if egress is None else {"egress": egress})}
    run = orch.submit(*TINY, *SHORT, "train.steps=100000", options=options)
    run.step(3)  # peers and DNS are reached
    first = orch.pods(run.id)[0]
    name = first["metadata"]["name"]
    address = first["status"]["podIP"]
    stranger_pod = stranger(orch)
    theirs = orch.bed.get("pod", "-n", orch.namespace, stranger_pod)["status"]["podIP"]
    assert reaches(orch, stranger_pod, theirs, PORT)
    assert reaches(orch, stranger_pod, address, 9401)
    assert not reaches(orch, stranger_pod, address, 9403)
    assert reaches(orch, name, theirs, PORT) == (egress is None or bool(egress))
    run.step(max(run.steps()) + 2)
    orch("cancel", run.id)
