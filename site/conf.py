"""Sphinx settings of the documentation site. Nothing is fetched while it is built, and nothing while it is read."""

import os
import re
import sys
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

from minivllm import __version__

sys.path.insert(0, str(Path(__file__).parent))
from annotations import hide_raw_values, join_first_line, join_names, readable_signature, resolve, skip_member

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # the kernels' reference is read off their modules, on any machine

project = "minivllm"
author = "the minivllm authors"
release = __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "_extra"]
root_doc = "index"

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the stored outputs are shown; `make test` compares them with a fresh run
nb_merge_streams = True
nb_ipywidgets_js = {}  # or else each page loads a script from elsewhere
# A page has no kernel: the picture that a widget left behind wins over the widget.
nb_mime_priority_overrides = [("html", "text/html", 0), ("html", "application/vnd.jupyter.widget-view+json", 99)]

default_role = "code"  # docstrings write `names` as Markdown does
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # as they are written, not `<function <lambda> at ...>`
napoleon_numpy_docstring = False
napoleon_use_rtype = False  # what is returned stands in one place
napoleon_use_ivar = True  # or else the fields of a dataclass are described twice
viewcode_line_numbers = True
viewcode_follow_imported_members = False  # a name handed on has its source where it is defined

html_theme = "pydata_sphinx_theme"
html_title = "minivllm"
html_favicon = "static/icon.svg"
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_sidebars = {"index": [], "features": [], "glossary": [], "benchmarks": []}
html_context = {"default_mode": "auto"}
html_theme_options = {
    "logo": {"text": "minivllm"},
    "header_links_before_dropdown": 7,
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": {"**": ["page-toc"], "index": []},
    "footer_start": [],
    "footer_end": [],
    "show_nav_level": 1,
    "navigation_depth": 3,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_math_renderer = "mathml"


def visit_math(self: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Formulas as MathML, which browsers draw by themselves."""
    block = isinstance(node, nodes.math_block)
    self.body.append(re.sub(r"\s+", " ", convert(node.astext(), display="block" if block else "inline")))
    raise nodes.SkipNode


def add_extra_files(app: Sphinx, _: object) -> None:
    """Whole pages that views have saved go to the site as they are."""
    app.config.html_extra_path = [str(app.srcdir / "_extra")]


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.connect("config-inited", add_extra_files)
    app.connect("doctree-read", resolve)
    app.connect("doctree-read", hide_raw_values)
    app.connect("autodoc-process-signature", readable_signature)
    app.connect("autodoc-skip-member", skip_member)
    for mend in (join_names, join_first_line):
        app.connect("autodoc-process-docstring", mend, priority=600)  # after napoleon, which comes at 500
