"""Sphinx settings of the documentation pages. Nothing is fetched while they are built, and nothing while they are read."""

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

from minivllm import __version__

project = "minivllm"
author = "the minivllm authors"
release = __version__
extensions = ["myst_nb"]
exclude_patterns = ["_build"]
root_doc = "index"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the stored outputs are shown; `make test` compares them with a fresh run
nb_merge_streams = True
nb_ipywidgets_js = {}  # or else each page loads a script from elsewhere
# A page has no kernel: the picture that a widget left behind wins over the widget.
nb_mime_priority_overrides = [("html", "text/html", 0), ("html", "application/vnd.jupyter.widget-view+json", 99)]

html_theme = "pydata_sphinx_theme"
html_title = "minivllm"
html_show_sourcelink = False
html_theme_options = {
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": [],
    "show_nav_level": 2,
}
html_math_renderer = "mathml"


def visit_math(self: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Formulas as MathML, which browsers draw by themselves."""
    block = isinstance(node, nodes.math_block)
    self.body.append(re.sub(r"\s+", " ", convert(node.astext(), display="block" if block else "inline")))
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
