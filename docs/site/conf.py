"""Sphinx, for the pages that build.py has collected."""

from sphinx.pycode import ModuleAnalyzer

project = "fused_layernorm"
author = copyright = "the authors of fused_layernorm"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx-mathjax-offline", "myst_parser"]
html_theme = "furo"
html_title = project
html_static_path = ["site.css"]
html_css_files = ["site.css"]
exclude_patterns = ["**/_*"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = True

# Pages show the function's own signature, with all options, and not its overloads.
functions = ModuleAnalyzer.for_module("fused_layernorm.functional")
functions.analyze()
functions.overloads = {}
