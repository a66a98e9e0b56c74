"""`python -m tests.beds.kubernetes.api_steps STEP`, inside a bed: what only works where the API
server is reached.

Prints one JSON value; an OrchError becomes {"error": message, "exit": code}.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial

import msgspec
from msgspec import structs

from orchestrator.backends.kubernetes.api.client import Cluster, gather
from orchestrator.backends.kubernetes.cluster_view import read_snapshot
from orchestrator.backends.kubernetes.code_store import owner_of, store_code
from orchestrator.backends.kubernetes.objects.code_maps import chunk_names, code_maps
from orchestrator.backends.kubernetes.objects.render import render
from orchestrator.backends.kubernetes.options import read_options
from orchestrator.backends.kubernetes.placement_lock import NAME, placement_lock
from orchestrator.backends.kubernetes.submission import apply_all, is_sent, set_owner
from orchestrator.backends.kubernetes.train_run import Spec, TrainRun, body_of
from orchestrator.backends.kubernetes.train_run_client import complete_draft
from orchestrator.errors import OrchError
from orchestrator.run.request import PackedCode
from tests.kubernetes.test_render import CASES, manifest, request_of

SMALL_KINDS = ("Secret", "ConfigMap", "Service")


def objects(name: str, submission: str = "", **options: object) -> list[dict]:
    overrides = ["cluster=h100x64", "model=llama3_8b"]
    return render(
        structs.replace(manifest(request_of(overrides, name), options), submission=submission)
    )


def put(cluster: Cluster, bodies: list[dict], submission: str) -> None:
    """Send them as `submit_objects` does."""
    if not is_sent(cluster, bodies, submission):
        set_owner(
            cluster,
            bodies,
            apply_all(cluster, bodies, bodies[0]["metadata"]["name"], submission),
            submission,
        )


def dry_run() -> dict[str, list[str]]:
    """Every golden case through the server's own validation, unknown fields refused."""
    cluster = Cluster()
    kinds = {}
    for name, options in CASES.items():
        if options.get("kind", "job") == "job":  # the API server has no JobSets
            in_default = options | {"namespace": "default"}
            bodies = objects("dry-1", **in_default)
            kinds[name] = [cluster.apply(body, "test", dry_run=True)["kind"] for body in bodies]
    return kinds


def complaint(deed: Callable[[], object]) -> str:
    try:
        deed()
    except OrchError as error:
        return error.message
    return ""


def twice() -> dict[str, object]:
    """One submission that is repeated, and one of somebody else."""
    cluster = Cluster()
    put(cluster, objects("twice-1", "mine"), "mine")
    first = cluster.get("Job", "twice-1")["metadata"]
    put(cluster, objects("twice-1", "mine"), "mine")
    again = cluster.get("Job", "twice-1")["metadata"]
    foreign_complaint = complaint(lambda: put(cluster, objects("twice-1", "theirs"), "theirs"))
    owners = [
        cluster.get(kind, "twice-1")["metadata"]["ownerReferences"][0]["uid"]
        for kind in SMALL_KINDS
    ]
    return {
        "same": first["uid"] == again["uid"],
        "other": foreign_complaint,
        "owned": set(owners) == {first["uid"]},
    }


def refused() -> dict[str, object]:
    cluster = Cluster()
    bodies = objects("refused-1", "mine")
    bodies[-1]["spec"]["backoffLimit"] = -1
    error_text = complaint(lambda: put(cluster, bodies, "mine"))
    return {
        "said": error_text,
        "left": [kind for kind in (*SMALL_KINDS, "Job") if cluster.get(kind, "refused-1")],
    }


def nodes() -> dict[str, object]:
    """What is read before nodes are chosen for a run that asks for its GPUs by a claim."""
    cluster = Cluster()
    cluster.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpus-1"}})
    texts = {"type": {"string": "gpu"}, "productName": {"string": "NVIDIA H100 80GB HBM3"}}
    devices = [{"name": f"gpu-{index}", "attributes": texts} for index in range(8)]
    pool = {"name": "gpus-1", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "gpu.nvidia.com", "nodeName": "gpus-1", "pool": pool, "devices": devices}
    about = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "gpus-1"},
    }
    cluster.create({**about, "spec": spec})
    claims = {"spec": {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "eight"}]}}
    snapshot = read_snapshot(cluster, read_options({"image": "x", "pod": claims}))
    return {
        "nodes": [node.metadata.name for node in snapshot.nodes],
        "devices": msgspec.to_builtins(snapshot.devices),
    }


def look() -> dict[str, object]:
    started = time.monotonic()
    try:
        Cluster().list("Job")
        return {"error": ""}
    except OrchError as error:
        return {
            "error": error.message,
            "exit": int(error.exit),
            "seconds": time.monotonic() - started,
        }


def lease() -> dict[str, object]:
    """A holder that stood still is overtaken, and does not take the other's Lease with it."""
    cluster = Cluster()
    kinds = []
    with placement_lock(cluster, "still", lease_s=1) as check:
        error_text = complaint(lambda: placement_lock(cluster, "hasty", wait_s=0.1).__enter__())
        with placement_lock(cluster, "next"):
            pass
        late = complaint(check)
        with placement_lock(cluster, "last"):
            kinds.append(
                cluster.delete("Lease", NAME, only=("00000000-0000-0000-0000-000000000000", "1"))
            )
            kinds.append(cluster.get("Lease", NAME)["spec"]["holderIdentity"].startswith("last-"))
    return {"said": error_text, "late": late, "kept": kinds, "left": cluster.get("Lease", NAME)}


def drafts() -> dict[str, object]:
    """Drafts of TrainRuns: one becomes a run, one has a Secret that is refused, one is discarded
    meanwhile; one becomes a run with a program, and one has a program of whose name there is
    another."""
    cluster = Cluster()
    complaints = {}
    spec = Spec(words=["cluster=local"], draft=True)
    for name in ("kept", "refused", "discarded"):
        draft = cluster.create(body_of(name, cluster.namespace, spec, {}, {}))
        if name == "discarded":
            cluster.delete("TrainRun", name)
        secret_name = "No Name" if name == "refused" else f"{name}-env"
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": secret_name, "namespace": cluster.namespace},
        }
        complete = partial(complete_draft, cluster, draft, secret)
        complaints[name] = complaint(complete)
    archive = b"a program"
    packed = PackedCode(sha256=hashlib.sha256(archive).hexdigest(), bytes=len(archive))
    for name, content in (("program", archive), ("forged", archive[::-1])):
        draft = cluster.create(body_of(name, cluster.namespace, spec, {}, {}))
        maps = code_maps(packed, content, cluster.namespace)
        complaints[name] = complaint(partial(complete_draft, cluster, draft, {}, maps))
    [chunk] = [cluster.get("ConfigMap", name) for name in chunk_names(packed)]
    left = {run.metadata.name: run.spec.draft for run in cluster.read("TrainRun", TrainRun)}
    owners = [(owner["kind"], owner["name"]) for owner in chunk["metadata"]["ownerReferences"]]
    return {"said": complaints, "left": left, "owners": owners}


def code() -> dict[str, object]:
    """Two submitters at once with the same program, a third with another one of the same name."""
    cluster = Cluster()
    archive = bytes(range(256)) * 5000
    packed = PackedCode(sha256=hashlib.sha256(archive).hexdigest(), bytes=len(archive))
    maps = code_maps(packed, archive, cluster.namespace)
    owners = []
    for name in ("first", "second", "third"):
        metadata = {"name": name}
        secret = cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata})
        owners.append(owner_of(secret))
    gather(partial(store_code, cluster, maps, owner, owner["name"]) for owner in owners[:2])
    stored = [cluster.get("ConfigMap", name) for name in chunk_names(packed)]
    store_code(cluster, maps, owners[2], "third")
    store_code(cluster, maps, owners[2], "third")
    again = [cluster.get("ConfigMap", name) for name in chunk_names(packed)]
    other = code_maps(packed, archive[::-1], cluster.namespace)
    return {
        "content": [
            body["binaryData"] == sent["binaryData"] for body, sent in zip(again, maps, strict=True)
        ],
        "same": [body["metadata"]["uid"] for body in stored]
        == [body["metadata"]["uid"] for body in again],
        "owners": [
            sorted(owner["name"] for owner in body["metadata"]["ownerReferences"]) for body in again
        ],
        "other": complaint(lambda: store_code(cluster, other, owners[0], "first")),
    }


STEPS: dict[str, Callable[[], object]] = {
    "dry-run": dry_run,
    "twice": twice,
    "refused": refused,
    "nodes": nodes,
    "look": look,
    "lease": lease,
    "drafts": drafts,
    "code": code,
}

if __name__ == "__main__":
    print(json.dumps(STEPS[sys.argv[1]]()))
