"""Reads YAML whose value is no larger than its text: aliases that repeat parts without limit,
and nesting without limit, are refused before any value is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    import yaml

#: Values in the description of a cluster with tens of thousands of nodes.
MOST_VALUES = 1_000_000
_MAX_DEPTH = 50
_TOO_DEEP = "it is nested too deeply"


def load(document: str | bytes, max_values: int, loader: Any = None) -> Any:
    """Reads the only document of a text, with at most `max_values` values where aliases repeat
    them. `loader`: one of yaml's safe loaders.

    OrchError (65) with a message that a file's name can precede; yaml.YAMLError for a text that
    is not YAML.
    """
    import yaml

    if loader and is_deep(document, loader):  # libyaml's own check would end the process
        raise OrchError(_TOO_DEEP, Exit.CONFIG)
    reader = (loader or yaml.SafeLoader)(document)
    try:
        node = reader.get_single_node()
        if node is None:
            return None
        _check(node, max_values)
        return reader.construct_document(node)
    except RecursionError:
        raise OrchError(_TOO_DEEP, Exit.CONFIG) from None
    except ValueError as error:  # a date that is in no calendar
        raise OrchError(str(error), Exit.CONFIG) from None
    finally:
        reader.dispose()


def check(document: str, max_values: int) -> None:
    """Raises OrchError (65) where `load` does; a text that is not YAML passes. Costs nothing
    without aliases."""
    import yaml

    if "&" not in document or "*" not in document:
        return
    try:
        node = yaml.compose(document, yaml.SafeLoader)
    except RecursionError:
        raise OrchError(_TOO_DEEP, Exit.CONFIG) from None
    except yaml.YAMLError:
        return
    if node is not None:
        _check(node, max_values)


def is_deep(document: str | bytes, loader: Any = None) -> bool:
    """Tells whether more brackets and blocks of a text are open at once than anybody writes."""
    import yaml

    depth = 0
    try:
        for event in yaml.parse(document, loader or yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                return True
    except yaml.YAMLError:
        pass
    return False


def _check(top: yaml.Node, max_values: int) -> None:
    """Counts the values below each node without walking a part twice; a part that several
    aliases name counts as often. OrchError (65) if there are too many, or a part contains
    itself."""
    counts: dict[int, int] = {}
    ancestors: set[int] = set()

    def count(node: yaml.Node) -> int:
        counted = counts.get(id(node))
        if counted is not None:
            return counted
        if id(node) in ancestors:
            raise OrchError("an alias in it contains itself", Exit.CONFIG)
        ancestors.add(id(node))
        children = [] if isinstance(node.value, str) else node.value
        elements: list[yaml.Node] = []
        for child in children:
            elements += child if isinstance(child, tuple) else [child]
        total = 1 + sum(map(count, elements))
        if total > max_values:
            raise OrchError(
                f"its aliases expand it to more than {max_values:,} values", Exit.CONFIG
            )
        ancestors.discard(id(node))
        counts[id(node)] = total
        return total

    count(top)
