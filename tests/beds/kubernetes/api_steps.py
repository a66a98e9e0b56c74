"""`python -m tests.beds.kubernetes.api_steps STEP`, inside a bed: what only works where the API server is reached.

Prints one JSON value; an OrchError becomes {"error": message, "exit": code}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from msgspec import structs

from orchestrator.backends.kubernetes.api.client import Cluster
from orchestrator.backends.kubernetes.objects.render import Manifest, render
from orchestrator.backends.kubernetes.options import read_options
from orchestrator.config.compose import load
from orchestrator.errors import OrchError
from orchestrator.run.request import Code, Site, make_request
from tests.kubernetes.test_render import CASES, IMAGE
from tests.kubernetes.test_watching import put
from tests.planner.configs import build_plan

SMALL_KINDS = ("Secret", "ConfigMap", "Service")


def objects(name: str, submission: str = "", **options: object) -> list[dict]:
    config = load(["cluster=h100x64", "model=llama3_8b", "backend=kubernetes", f"run.name={name}"], None)
    plan = build_plan(config)
    site = Site(run_id=name, home="/h", runs_dir="/h", python="/py", environment_names=[], cwd="/w",
                code=Code(kind="none"))  # fmt: skip
    given = read_options({**IMAGE, **options})
    run = Manifest(request=make_request(config, plan, site).request, plan=plan, options=given, config=b"x: 1\n")
    return render(structs.replace(run, namespace="default", key="ab" * 32, submission=submission))


def dry_run(kind: str) -> dict[str, list[str]]:
    """Every golden case through the server's own validation, unknown fields refused."""
    cluster, found = Cluster(), {}
    for name, options in CASES.items():
        if options.get("kind", "job") == kind:
            bodies = objects("dry-1", **{**options, "namespace": "default"})
            found[name] = [cluster.apply(body, "test", dry_run=True)["kind"] for body in bodies]
    return found


def twice() -> dict[str, object]:
    """One submission that is repeated, and one of somebody else."""
    cluster = Cluster()
    put(cluster, objects("twice-1", "mine"), "mine")
    first = cluster.get("Job", "twice-1")["metadata"]
    put(cluster, objects("twice-1", "mine"), "mine")
    again = cluster.get("Job", "twice-1")["metadata"]
    try:
        put(cluster, objects("twice-1", "theirs"), "theirs")
        other = ""
    except OrchError as error:
        other = error.message
    owners = [cluster.get(kind, "twice-1")["metadata"]["ownerReferences"][0]["uid"] for kind in SMALL_KINDS]
    return {"same": first["uid"] == again["uid"], "other": other, "owned": set(owners) == {first["uid"]}}


def refused() -> dict[str, object]:
    cluster, bodies = Cluster(), objects("refused-1", "mine")
    bodies[-1]["spec"]["backoffLimit"] = -1
    try:
        put(cluster, bodies, "mine")
        said = ""
    except OrchError as error:
        said = error.message
    return {"said": said, "left": [kind for kind in (*SMALL_KINDS, "Job") if cluster.get(kind, "refused-1")]}


def look() -> dict[str, object]:
    started = time.monotonic()
    try:
        Cluster().list("Job")
        return {"error": ""}
    except OrchError as error:
        return {"error": error.message, "exit": int(error.exit), "seconds": time.monotonic() - started}


STEPS: dict[str, Callable[[], object]] = {
    "dry-run": lambda: dry_run("job"),
    "dry-run-jobset": lambda: dry_run("jobset"),
    "twice": twice,
    "refused": refused,
    "look": look,
}

if __name__ == "__main__":
    print(json.dumps(STEPS[sys.argv[1]]()))
