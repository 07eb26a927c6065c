"""Sphinx, for the pages that build.py has collected."""

project = "fused_layernorm"
author = copyright = "the authors of fused_layernorm"
extensions = ["sphinx-mathjax-offline", "myst_parser"]
html_theme = "furo"
html_title = project
html_static_path = ["site.css"]
html_css_files = ["site.css"]
exclude_patterns = ["**/_*"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "dollarmath"]
