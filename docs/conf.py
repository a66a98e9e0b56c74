"""The site: `make docs` builds it with Sphinx into build/site, with a search."""

project = "orch"
author = "the authors of orch"
copyright = "the authors of orch, Apache-2.0"  # the name that Sphinx reads
extensions = ["myst_parser"]
exclude_patterns = ["conf.py", "make_reference.py"]
html_theme = "alabaster"
html_theme_options = {"page_width": "1080px", "fixed_sidebar": True}
html_show_sourcelink = False
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nitpicky = True
# Pages link to files of the repository as well, which are no part of the site.
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]
