"""An independent oracle: it judges the files that `python -m trainer` has written, and imports
nothing of `trainer` (docs/verify.md).

Written from the documentation and the papers, in plain torch; the networks themselves are those of
`transformers`.
"""
