"""Merges `backend.options.pod`, a site's own fields of the pod, into the pod that the plan needs.
Pure.

It is a strategic merge as in `kubectl patch`: mappings merge, null deletes, lists of named entries
merge by that name ({"$patch": "delete"} removes one), other lists are replaced. A volume with a
source replaces the one of its name. Every field and type is checked against the models of the
installed kubernetes package, so that a wrong word is refused before anything has been sent.

Source: https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
and patchMergeKey of each list in the API's reference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from orchestrator.backends.kubernetes.names import (
    CONTAINER,
    INPUT,
    OWN_FIELDS,
    REQUIRED,
    Body,
    JsonObject,
)
from orchestrator.errors import OrchError, check_installed, did_you_mean
from orchestrator.plan.exits import Exit

PLACE = "backend.options.pod"
NODE_AFFINITY = "spec.affinity.nodeAffinity"
#: List -> the field that identifies its entries.
_KEYS = {
    **dict.fromkeys(
        ("containers", "initContainers", "volumes", "env", "resourceClaims", "claims"), "name"
    ),
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
_ENDS = "the run decides how its pods end"
_NAMES = "the run's pods find each other by it"
_PLACED = "nodes are chosen by the plan"
_INPUT = "the run's plan and key are there"
#: Fields that a patch may add to and not delete.
_NEEDED = {"metadata", "spec", "spec.containers", "spec.volumes"}
_NEEDED |= {f"spec.containers.{CONTAINER}.{name}" for name in ("env", "ports", "volumeMounts")}
#: Field of the pod, or of the agent's container -> why it is refused; an option's name if there is
#: one for it.
_REFUSED = {
    "metadata.labels": "labels",
    "spec.nodeSelector": "node_selector",
    "spec.tolerations": "tolerations",
    "spec.imagePullSecrets": "pull_secrets",
    "spec.serviceAccountName": "service_account",
    "spec.priorityClassName": "priority_class",
    f"spec.containers.{CONTAINER}.image": "image",
    f"spec.containers.{CONTAINER}.imagePullPolicy": "pull_policy",
    **dict.fromkeys(
        ("spec.restartPolicy", "spec.terminationGracePeriodSeconds", "spec.activeDeadlineSeconds"),
        _ENDS,
    ),
    **dict.fromkeys(("spec.hostname", "spec.subdomain", "spec.hostnameOverride"), _NAMES),
    "spec.nodeName": _PLACED,
    NODE_AFFINITY: (
        f"{_PLACED}; backend.options.exclude excludes nodes, and if a queue places the run,"
        " NotIn does"
    ),
    **dict.fromkeys(
        (f"spec.containers.{CONTAINER}.command", f"spec.containers.{CONTAINER}.args"),
        "it starts the agent",
    ),
    "spec.volumes.input": _INPUT,
    f"spec.containers.{CONTAINER}.volumeMounts.{INPUT}": _INPUT,
    **dict.fromkeys((f"spec.containers.{CONTAINER}.env.{name}" for name in OWN_FIELDS), _NAMES),
    "spec.ephemeralContainers": "Kubernetes takes none in a Job",
}


def patched(template: JsonObject, patch: Body, in_queue: bool = False) -> JsonObject:
    """Returns the pod template with the patch in it, or the same template without a patch.
    `in_queue`: a queue chooses the nodes, so the patch may exclude some.

    OrchError (65), with its place, for a field that Kubernetes does not have, a value of another
    type, or a field that the run needs; also if the kubernetes package that checks them is not
    installed.
    """
    if not patch:
        return template
    check_installed("kubernetes", PLACE)
    exclusions: list[Any] = []
    if in_queue and (affinity := _at(patch, NODE_AFFINITY)) is not None:
        exclusions = _exclusions(affinity)
        patch = _without(patch, NODE_AFFINITY.split("."))
    for name in patch.keys() - {"metadata", "spec"}:
        _refuse(
            name, f"is not a part of a pod template; {did_you_mean(name, ('metadata', 'spec'))}"
        )
    _check(patch, "V1PodTemplateSpec", "")
    for name in patch.get("metadata", {}).keys() - {"annotations"}:
        _refuse(f"metadata.{name}", "is not for a pod template, which takes annotations alone")
    merged: JsonObject = _merge(template, patch, "")
    spec = merged["spec"]
    if exclusions:
        spec["affinity"] = _with_terms(spec.get("affinity", {}), exclusions)
    for container in spec["containers"]:
        if container["name"] != CONTAINER:
            reason = (
                "would live on after the run; put it into initContainers with restartPolicy: Always"
            )
            _refuse(f"spec.containers.{container['name']}", reason)
    if spec.get("hostNetwork"):  # else pods could not resolve pod 0's name
        spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    return merged


def _at(value: object, path: str) -> object:
    """Returns the value at that path; None if there is none, or if something on the way is not a
    mapping."""
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _without(value: Body, path: Sequence[str]) -> JsonObject:
    """Returns a copy that lacks the value at that path."""
    first, *rest = path
    if not rest:
        return {name: field for name, field in value.items() if name != first}
    return {**value, first: _without(value[first], rest)}


def _exclusions(affinity: object) -> list[Any]:
    """Returns the terms of a node affinity that excludes nodes and does nothing else."""
    path = f"{NODE_AFFINITY}.{REQUIRED}"
    for name in _mapping(affinity, NODE_AFFINITY):
        if name != REQUIRED:
            _refuse(
                f"{NODE_AFFINITY}.{name}", f"cannot be set: only {REQUIRED}, which leaves nodes out"
            )
    _check(_at(affinity, REQUIRED), "V1NodeSelector", path)
    terms = _at(affinity, f"{REQUIRED}.nodeSelectorTerms")
    if not isinstance(terms, list) or not terms:
        _refuse(f"{path}.nodeSelectorTerms", "must be a list of terms")
    for index, term in enumerate(terms):
        term_path = f"{path}.nodeSelectorTerms.{index}"
        rules = _at(term, "matchExpressions")
        only_rules = set(_mapping(term, term_path)) == {"matchExpressions"}
        if not only_rules or not isinstance(rules, list) or not rules:
            _refuse(term_path, "must have matchExpressions and nothing else")
        for rule in rules:
            if rule.get("operator") not in ("NotIn", "DoesNotExist"):
                reason = (
                    "operator must be NotIn or DoesNotExist; backend.options.node_selector names"
                    " labels to have"
                )
                _refuse(f"{term_path}.matchExpressions", reason)
    return terms


def _with_terms(affinity: Body, terms: Sequence[Any]) -> JsonObject:
    """Returns the affinity with one of these terms required in addition to its own."""
    nodes = affinity.get("nodeAffinity", {})
    own_terms = nodes.get(REQUIRED, {}).get("nodeSelectorTerms") or [{"matchExpressions": []}]
    combined = [
        {"matchExpressions": [*own_term["matchExpressions"], *added_term["matchExpressions"]]}
        for own_term in own_terms
        for added_term in terms
    ]
    return {**affinity, "nodeAffinity": {**nodes, REQUIRED: {"nodeSelectorTerms": combined}}}


def _refuse(path: str, reason: str) -> NoReturn:
    full_path = f"{PLACE}.{path}" if path else PLACE
    raise OrchError(f"{full_path} {reason}", Exit.CONFIG)


# ------------------------------------------------------------------------------------------ types


def _check(value: object, kind: str, path: str) -> None:
    """Checks a value against its type. `kind` as the models write it: str, int, bool, object,
    List[X], dict(str, X), or the name of a model."""
    if reason := _REFUSED.get(path):
        if re.fullmatch("[a-z_]+", reason):
            _refuse(path, f"has an option of its own: backend.options.{reason}")
        _refuse(path, f"cannot be set: {reason}")
    if value is None and path in _NEEDED:
        _refuse(path, "cannot be deleted: the run needs it")
    if value is None or kind in ("object", "datetime"):
        return
    if inner := re.fullmatch(r"[lL]ist\[(.+)\]", kind):
        _check_list(value, inner[1], path)
    elif inner := re.fullmatch(r"[dD]ict[(\[]str, (.+)[)\]]", kind):
        for name, field in _mapping(value, path).items():
            _check(field, inner[1], f"{path}.{name}")
    elif kind in ("str", "int", "float", "bool"):
        _check_scalar(value, kind, path)
    else:
        _check_model(_mapping(value, path), kind, path)


def _check_list(value: object, kind: str, path: str) -> None:
    if not isinstance(value, list):
        _refuse(path, f"must be a list, not {value!r}")
    key = _KEYS.get(path.rpartition(".")[2])
    for index, entry in enumerate(value):
        name: object = index
        if key is not None:
            name = _mapping(entry, f"{path}.{index}").get(key)
            if not isinstance(name, str | int):
                _refuse(f"{path}.{index}", f"needs {key!r}, by which it is merged")
        if not (isinstance(entry, dict) and entry.get("$patch") == "delete"):
            _check(entry, kind, f"{path}.{name}")
        elif name == CONTAINER or f"{path}.{name}" in _REFUSED:
            _refuse(f"{path}.{name}", "cannot be deleted: the run needs it")


def _check_scalar(value: object, kind: str, path: str) -> None:
    is_quantity = re.search(r"\.(requests|limits|capacity)\.[^.]*", path) is not None
    if kind == "str" and is_quantity and isinstance(value, int | float):
        return
    if kind == "str":
        fits = isinstance(value, str)
    elif kind == "bool":
        fits = isinstance(value, bool)
    elif kind == "float":
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        fits = isinstance(value, int) and not isinstance(value, bool)
    if not fits:
        _refuse(path, f"must be {'true or false' if kind == 'bool' else kind}, not {value!r}")


def _check_model(value: Body, kind: str, path: str) -> None:
    from kubernetes import client

    model = getattr(client, kind)
    types = {model.attribute_map[name]: field for name, field in model.openapi_types.items()}
    for name, field in value.items():
        if name not in types:
            _refuse(
                f"{path}.{name}".lstrip("."),
                f"is not a field of Kubernetes; {did_you_mean(name, types)}",
            )
        _check(field, types[name], f"{path}.{name}".lstrip("."))


def _mapping(value: object, path: str) -> Body:
    if not isinstance(value, dict):
        _refuse(path, f"must be a mapping, not {value!r}")
    return value


# ---------------------------------------------------------------------------------------- the merge


def _merge(old: Any, new: Any, name: str) -> Any:
    """Merges two values of the field `name`."""
    if isinstance(old, dict) and isinstance(new, Mapping):
        merged = {
            key: value for key, value in old.items() if key not in new or new[key] is not None
        }
        for key, value in new.items():
            if value is not None:
                merged[key] = _merge(merged.get(key), value, key)
        return merged
    if isinstance(new, Mapping):
        return {key: _merge(None, value, key) for key, value in new.items() if value is not None}
    if isinstance(new, list) and (key := _KEYS.get(name)):
        entries = {entry[key]: entry for entry in old or []}
        for entry in new:
            if entry.get("$patch") == "delete":
                entries.pop(entry[key], None)
            elif name == "volumes" and len(entry) > 1:  # a volume has one source
                entries[entry[key]] = entry
            else:
                entries[entry[key]] = _merge(entries.get(entry[key]), entry, "")
        return list(entries.values())
    return new
