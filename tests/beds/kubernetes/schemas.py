"""JSON schemas for kubeconform: Kubernetes' own kinds from a version's OpenAPI document, custom
ones from their CRDs.

Both are parts of Go modules, pinned here by their checksums; `api/openapi-spec/swagger.json` of
k8s.io/kubernetes is what that version's API server serves. Made once into the cache folder.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .building import cache

#: Oldest with podFailurePolicy in batch/v1 for good, one in between, the test cluster's, the
#: newest.
KUBERNETES = {
    "v1.31.14": "h1:UtjLfqvXLuSVDdJ4+NpQCIfFkKkLnAAVmxAEMsnkhjk=",
    "v1.33.7": "h1:Qhp1gwCPSOqt3du6A0uTGrrTcZDtShdSCIR5IZag16Y=",
    "v1.35.4": "h1:o/8dBC/pHVpYoGV4OAIytAlNPZbdYVTXJHoYvXC4qzM=",
    "v1.37.1": "h1:LTUzSbp9n0W7649oVKBYfC48zcoD3vCk++1PZQn28q8=",
}
#: module -> (version, checksum, its CRDs, the kinds that we render)
CUSTOM = {
    "sigs.k8s.io/jobset": (
        "v0.11.0", "h1:1r2uTNQmylnqG/WCSSDADgNkHryvyUaCNCOgvSPWpN8=",
        "config/components/crd/bases/jobset.x-k8s.io_{}.yaml", ["jobsets"],
    ),
    "sigs.k8s.io/kueue": (
        "v0.15.0", "h1:9Khzc2ne6/eWuZx5o+R4KlVBzh3kZkTIMzpPC2e8Spg=",
        "config/components/crd/bases/kueue.x-k8s.io_{}.yaml",
        ["topologies", "resourceflavors", "clusterqueues", "localqueues"],
    ),
    "github.com/prometheus-operator/prometheus-operator": (
        "v0.85.0", "h1:M5xLCLEoaW2IJfnuCwFzzpL+jSVQu3KGT84Pye+fW8s=",
        "example/prometheus-operator-crd/monitoring.coreos.com_{}.yaml", ["podmonitors", "prometheusrules"],
    ),
}  # fmt: skip
#: Where kubeconform looks, below `folder()`.
LOCATIONS = (
    (
        "{{ .NormalizedKubernetesVersion }}/{{ .Group }}_{{ .ResourceAPIVersion }}_{{ .ResourceKind"
        " }}.json"
    ),
    "custom/{{ .Group }}_{{ .ResourceAPIVersion }}_{{ .ResourceKind }}.json",
)
_PREFIX = "#/definitions/"


def folder() -> Path:
    """The folder of all schemas, made if it is not there yet. RuntimeError when Go cannot give the
    modules."""
    cache_key = json.dumps([KUBERNETES, CUSTOM]).encode() + Path(__file__).read_bytes()
    target = cache() / f"schemas-{hashlib.sha256(cache_key).hexdigest()[:12]}"
    if target.is_dir():
        return target
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache(), prefix="schemas-part-") as partial_folder:
        schema_folder = Path(partial_folder, "made")
        for version, checksum in KUBERNETES.items():
            swagger = (
                module("k8s.io/kubernetes", version, checksum)
                / "api"
                / "openapi-spec"
                / "swagger.json"
            )
            write(schema_folder / version, of_swagger(json.loads(swagger.read_bytes())))
        for name, (version, checksum, crd, kinds) in CUSTOM.items():
            source = module(name, version, checksum)
            write(schema_folder / "custom", of_crds([source / crd.format(kind) for kind in kinds]))
        schema_folder.rename(target)
    return target


def module(name: str, version: str, checksum: str) -> Path:
    """Says where Go keeps the module, downloaded if need be."""
    argv = ["go", "mod", "download", "-json", f"{name}@{version}"]
    done = subprocess.run(
        argv, cwd=tempfile.gettempdir(), capture_output=True, text=True, timeout=600
    )
    download = json.loads(done.stdout or "{}")
    if done.returncode or download.get("Sum") != checksum:
        raise RuntimeError(
            f"{name}@{version}:"
            f" {download.get('Error') or download.get('Sum') or done.stderr.strip()[-300:]}"
        )
    return Path(download["Dir"])


def write(to: Path, schemas: Iterator[tuple[str, dict[str, Any]]]) -> None:
    to.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas:
        (to / f"{name}.json").write_text(json.dumps(schema))


# ------------------------------------------------------------------------------------------ pure


def of_swagger(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(group_version_kind, schema) of every kind, each with the definitions that it needs."""
    definitions = {name: strict(body) for name, body in document["definitions"].items()}
    for name, body in document["definitions"].items():
        for at in body.get("x-kubernetes-group-version-kind", ()):
            group = at["group"] or at["version"]
            kind = at["kind"].lower()  # as kubeconform calls the core group
            needed: dict[str, Any] = {}
            _gather(definitions[name], definitions, needed)
            yield f"{group}_{at['version']}_{kind}", {**definitions[name], "definitions": needed}


def of_crds(paths: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    import yaml

    for path in paths:
        for crd in filter(None, yaml.safe_load_all(path.read_text())):
            spec = crd["spec"]
            for version in spec["versions"]:
                name = f"{spec['group']}_{version['name']}_{spec['names']['kind'].lower()}"
                yield name, strict(version["schema"]["openAPIV3Schema"])


def strict(schema: Any) -> Any:
    """The same, taking no field that it does not name; numbers where Kubernetes takes numbers and
    text."""
    if isinstance(schema, list):
        return [strict(element) for element in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("format") == "int-or-string" or schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    strict_schema = {key: strict(value) for key, value in schema.items() if key != "format"}
    named = isinstance(schema.get("properties"), dict) and schema.get("type", "object") == "object"
    if (
        named
        and "additionalProperties" not in schema
        and not schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        strict_schema["additionalProperties"] = False
    return strict_schema


def _gather(node: Any, definitions: dict[str, Any], into: dict[str, Any]) -> None:
    """Put every definition that `node` refers to, at whatever distance, into `into`."""
    if isinstance(node, list):
        for child in node:
            _gather(child, definitions, into)
    elif isinstance(node, dict):
        name = node["$ref"].removeprefix(_PREFIX) if isinstance(node.get("$ref"), str) else None
        if name and name not in into:
            into[name] = definitions[name]
            _gather(definitions[name], definitions, into)
        for value in node.values():
            _gather(value, definitions, into)
