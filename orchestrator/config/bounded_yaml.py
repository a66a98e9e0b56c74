"""YAML that is as large as its text: aliases which repeat parts of it without end, and nesting
without end, are refused before anything is made of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    import yaml

#: Of a description of a cluster with tens of thousands of nodes.
MOST_VALUES = 1_000_000
_MOST_OPEN = 50
_DEEP = "it is nested too deeply"


def load(text: str | bytes, most: int, loader: Any = None) -> Any:
    """The one document of a text, with at most so many values where aliases repeat them. `loader`:
    a safe one of yaml's. OrchError (65) in words that a file's name can stand before;
    yaml.YAMLError for what is no YAML."""
    import yaml

    if loader and is_deep(text, loader):  # libyaml's would end the process
        raise OrchError(_DEEP, Exit.CONFIG)
    reader = (loader or yaml.SafeLoader)(text)
    try:
        node = reader.get_single_node()
        if node is None:
            return None
        _check(node, most)
        return reader.construct_document(node)
    except RecursionError:
        raise OrchError(_DEEP, Exit.CONFIG) from None
    except ValueError as error:  # a date of no calendar
        raise OrchError(str(error), Exit.CONFIG) from None
    finally:
        reader.dispose()


def check(text: str, most: int) -> None:
    """OrchError (65) where `load` raises it; what is no YAML passes. Costs nothing without
    aliases."""
    import yaml

    if "&" not in text or "*" not in text:
        return
    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except RecursionError:
        raise OrchError(_DEEP, Exit.CONFIG) from None
    except yaml.YAMLError:
        return
    if node is not None:
        _check(node, most)


def is_deep(text: str | bytes, loader: Any = None) -> bool:
    """Whether more brackets and blocks of a text are open at once than anybody writes."""
    import yaml

    depth = 0
    try:
        for event in yaml.parse(text, loader or yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                event, yaml.CollectionEndEvent
            )
            if depth > _MOST_OPEN:
                return True
    except yaml.YAMLError:
        pass
    return False


def _check(top: yaml.Node, most: int) -> None:
    """The values below each node, parts that several aliases name counted as often, without walking
    them twice."""
    counts: dict[int, int] = {}
    open_: set[int] = set()

    def count(node: yaml.Node) -> int:
        known = counts.get(id(node))
        if known is not None:
            return known
        if id(node) in open_:
            raise OrchError("an alias in it holds itself", Exit.CONFIG)
        open_.add(id(node))
        children = [] if isinstance(node.value, str) else node.value
        flat = [
            part for child in children for part in (child if isinstance(child, tuple) else (child,))
        ]
        found = 1 + sum(map(count, flat))
        if found > most:
            raise OrchError(
                f"its aliases repeat what they name to more than {most:,} values", Exit.CONFIG
            )
        open_.discard(id(node))
        counts[id(node)] = found
        return found

    count(top)
