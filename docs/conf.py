"""Configuration of hpcaccel's site: `make docs` builds docs/ into build/docs, without a network."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "extensions"), str(HERE.parent)]

import hpcaccel  # noqa: E402

project = "hpcaccel"
author = "The hpcaccel developers"
copyright = author
version = release = hpcaccel.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "hpcaccel_site"]
exclude_patterns = ["extensions", "_build"]
source_suffix = {".md": "markdown"}
root_doc = "index"
nitpicky = False
smartquotes = False  # -- is part of an option
default_role = "literal"

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 88
add_module_names = False

html_context = {"default_mode": "auto"}
html_theme = "pydata_sphinx_theme"
html_title = "hpcaccel"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "navigation_with_keys": True,
    "pygments_light_style": "tango",
    "pygments_dark_style": "monokai",
}
