"""Stores a program's folder in the cluster: once for all runs of a namespace with the same code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .api.client import Cluster, gather
from .names import Body, JsonObject

_TRIES = 5  # runs of others may delete and create the same object meanwhile
_AT_ONCE = 4  # a megabyte each, over a link that may be slow


def store_code(
    cluster: Cluster,
    maps: Sequence[Body],
    owner: JsonObject,
    manager: str,
) -> None:
    """Makes sure that these ConfigMaps exist and that `owner` is among their owners: creates those
    that are missing, and changes nothing but the owners of the others. One without owners was
    applied by hand and stays so.

    OrchError: 78 if one of these names holds something else, 65 and 78 for what the cluster
    refuses.
    """
    for first in range(0, len(maps), _AT_ONCE):
        batch = maps[first : first + _AT_ONCE]
        gather(partial(_store, cluster, body, owner, manager) for body in batch)


def field_manager(submission: str) -> str:
    """Returns the name under which a submission owns fields of the objects that it applies."""
    return f"orch-{submission}"


def owner_of(first: JsonObject) -> JsonObject:
    """Returns the reference by which a run's first object, its Secret or its TrainRun, owns others
    and takes them along when it is deleted."""
    metadata = first["metadata"]
    return {
        "apiVersion": first["apiVersion"],
        "kind": first["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
    }


def lacks_owner(stored: JsonObject, uid: str) -> bool:
    """Tells whether others own a stored object, and this owner does not."""
    owners = stored["metadata"].get("ownerReferences") or []
    return bool(owners) and uid not in [reference["uid"] for reference in owners]


def _store(cluster: Cluster, body: Body, owner: JsonObject, manager: str) -> None:
    name = body["metadata"]["name"]
    for attempt in range(_TRIES):
        stored = cluster.get("ConfigMap", name)
        try:
            if stored is None:
                metadata = {**body["metadata"], "ownerReferences": [owner]}
                cluster.apply({**body, "metadata": metadata}, manager)
                return
            _check_same(cluster, body, stored)
            if lacks_owner(stored, owner["uid"]):
                # with the uid it is refused, and not created without content, if the object is gone
                uid = stored["metadata"]["uid"]
                metadata = {"name": name, "uid": uid, "ownerReferences": [owner]}
                change = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
                cluster.apply(change, manager)
            return
        except OrchError as error:
            was_overtaken = getattr(error, "status", None) in (404, 409)
            if not was_overtaken or attempt == _TRIES - 1:
                raise


def _check_same(cluster: Cluster, body: Body, stored: Body) -> None:
    """Raises OrchError (78) if a stored object of this name has other content."""
    if stored.get("binaryData") == body["binaryData"] and stored.get("immutable"):
        return
    message = (
        f"ConfigMap {body['metadata']['name']} in {cluster.namespace} does not hold the code that"
        " its name promises: delete it"
    )
    raise OrchError(message, Exit.SECURITY)
