"""Tables in pages: what programs measured stands between two marks, the words around it are ours."""

from __future__ import annotations


def filled(text: str, name: str, content: str) -> str:
    """Returns the text of a page with `content` in its place of this name. Raises ValueError if the
    page has no such place."""
    begin = f"<!-- {name} -->\n"
    end = f"<!-- end of {name} -->"
    before, mark, rest = text.partition(begin)
    _, end_mark, after = rest.partition(end)
    if not mark or not end_mark:
        raise ValueError(f"the page has no place for {name}")
    return f"{before}{begin}{content}\n{end}{after}"
