"""From a plan and what the cluster looks like to objects that are sent: what `submit`, `resume` and `resize` share.

What may refuse comes before anything is sent. Requests that do not wait for one another go out at once: a run of eight
pods is bound a tenth of a second after its Job has arrived, so every request before that is felt.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from msgspec import structs

from orchestrator.backends.kubernetes.api.client import Cluster, in_background
from orchestrator.backends.kubernetes.cluster_view import Look, Place, place
from orchestrator.backends.kubernetes.names import object_name
from orchestrator.backends.kubernetes.objects.render import NO_KEY, Manifest, render
from orchestrator.backends.kubernetes.options import KubernetesOptions, read_options
from orchestrator.backends.kubernetes.record import KubernetesRecord, write_record
from orchestrator.backends.kubernetes.sending import hand_over, is_sent, send
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import PASSED, LaunchRequest

#: Variables of the submitting machine that mean nothing, or something else, inside a pod.
_OF_THIS_MACHINE = PASSED - {"LANG", "LANGUAGE", "TZ", "PYTHONHASHSEED", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_ORDER"}
_TRUSTED_S = 2.0  # that names are free; there may have been others in line


def unsent(request: LaunchRequest, plan: Plan) -> list[dict[str, Any]]:
    """The objects of a run but for what is found out or drawn when they are sent. OrchError (65)."""
    options = read_options(request.backend_options)
    return render(Manifest(request=request, plan=plan, options=options, config=b"", namespace=options.namespace or ""))


def start(
    cluster: Cluster,
    folder: RunFolder,
    request: LaunchRequest,
    plan: Plan,
    environ: Mapping[str, str],
    generation: int,
    drafts: Sequence[Mapping[str, Any]],
    looked: Future[Look] | None = None,
) -> None:
    """Choose places and send the objects. `drafts`: what `unsent` gives; `looked`: what `live.look` gives or raises."""
    options, submission = _owned(cluster, read_options(request.backend_options), folder.run_id)
    record = record_of(request, options, cluster.namespace, submission, generation)
    if is_sent(cluster, drafts, submission):
        write_record(folder, structs.replace(record, sent=True))
        return
    free_at = time.monotonic()
    write_record(folder, record)
    with place(cluster, plan, options, folder.run_id, looked) as found:
        for line in found.warnings:
            print(f"orch: warning: {line}", file=sys.stderr)
        objects = render(
            manifest_of(folder, request, plan, options, environ, cluster.namespace, submission, generation, found)
        )
        if time.monotonic() > free_at + _TRUSTED_S:
            is_sent(cluster, drafts, submission)
        main = send(cluster, objects, folder.run_id, submission)
        handed = in_background(lambda: hand_over(cluster, objects, main, submission))  # while our turn ends
    write_record(folder, structs.replace(record, sent=True))
    handed.result()


def _owned(cluster: Cluster, options: KubernetesOptions, run_id: str) -> tuple[KubernetesOptions, str]:
    """The options with their owner's uid, and what this submission is known by.

    Of an owner there is one submission, however often a launcher that lost its connection tries again.
    """
    owner = options.owner
    if owner is None:
        return options, os.urandom(8).hex()
    if not owner.uid:
        found = cluster.get("ConfigMap", owner.name)
        if found is None:
            text = f"backend.options.owner: no ConfigMap {owner.name} in namespace {cluster.namespace}"
            raise OrchError(text, Exit.CONFIG)
        owner = structs.replace(owner, uid=found["metadata"]["uid"])
        options = structs.replace(options, owner=owner)
    return options, hashlib.sha256(f"{owner.uid} {run_id}".encode()).hexdigest()[:16]


def manifest_of(
    folder: RunFolder,
    request: LaunchRequest,
    plan: Plan,
    options: KubernetesOptions,
    environ: Mapping[str, str],
    namespace: str,
    submission: str = "",
    generation: int = 0,
    found: Place | None = None,
) -> Manifest:
    """With the run's own key, and the values of variables that are passed on."""
    key = folder.key.read_text().strip() if folder.key.exists() else NO_KEY
    passed = {n: environ[n] for n in request.environment.names if n in environ and n not in _OF_THIS_MACHINE}
    return Manifest(
        request=request,
        plan=plan,
        options=options,
        config=folder.config.read_bytes(),
        namespace=namespace,
        key=key,
        environment=passed,
        topology=found.topology if found else None,
        chosen=found.chosen if found else None,
        submission=submission,
        generation=generation,
    )


def record_of(
    request: LaunchRequest, options: KubernetesOptions, namespace: str, submission: str = "", generation: int = 0
) -> KubernetesRecord:
    return KubernetesRecord(
        context=options.context,
        namespace=namespace,
        kind="JobSet" if options.kind == "jobset" else "Job",
        name=object_name(request.run_id, len(request.agents), options.kind),
        submission=submission,
        submitted_at=time.time(),
        generation=generation,
    )
