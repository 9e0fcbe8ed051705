"""Self-contained HTML: bundles ES modules, styles and data into a page."""

# Generated from nbs/viz/assets.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import base64
import hashlib
import html
import json
import re
import zlib
from functools import cache
from importlib.resources import files
from typing import Any

from minivllm.viz.palette import DARK, LIGHT, style_sheet
from minivllm.viz.payload import Payload

_IMPORT = re.compile(r'(?:\bfrom\s*|\bimport\s*\(?\s*)"\./(\w+)\.js"')


@cache
def _read(name: str) -> str:
    return (files("minivllm.viz") / "static" / name).read_text(encoding="utf-8")


def sources(*modules: str) -> dict[str, str]:
    """The text of ES modules and of all that they import, by name; `mount`, which starts every view, included.

    Raises:
        ValueError: there is no such module.
    """
    found: dict[str, str] = {}
    wanted = ["mount", *modules]
    while wanted:
        name = wanted.pop()
        if name not in found:
            try:
                found[name] = _read(f"{name}.js")
            except FileNotFoundError:
                raise ValueError(f"minivllm.viz has no ES module {name}.js") from None
            wanted += _IMPORT.findall(found[name])
    return dict(sorted(found.items()))


def styles() -> dict[str, str]:
    """The style sheet: the palette's variables and the rules of all views."""
    return {"viz": style_sheet() + _read("viz.css")}


@cache
def version() -> str:
    """Eight hex digits that change with any file of the pages' program."""
    folder = files("minivllm.viz") / "static"
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith((".js", ".css")))
    return hashlib.sha256("\0".join([style_sheet(), *map(_read, names)]).encode()).hexdigest()[:8]


def loader() -> str:
    """The classic script that loads the modules."""
    return _read("loader.js").replace("@VERSION@", version())


def pack_modules(*modules: str) -> str:
    """Modules and styles, deflated, as base64."""
    text = json.dumps({"modules": sources(*modules), "styles": styles()})
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def fragment(payload: Payload, modules: tuple[str, ...], text: str, program: bool = True) -> str:
    """A piece of HTML that shows a view, with no request to anywhere.

    Args:
        modules: names of the ES modules that the view needs.
        text: shown until the program has started, and where scripts do not run.
        program: bring the modules along; False only where another fragment of the page brings the same ones, after this one.
    """
    parts = [
        f'<div class="mv" data-version="{version()}">',
        f'<pre class="mv-text">{html.escape(text)}</pre>',
        f'<script type="application/json" class="mv-header">{payload.json()}</script>',
        f'<script type="text/plain" class="mv-bytes">{base64.b64encode(payload.bytes()).decode()}</script>',
        "</div>",
    ]
    if program:
        parts += [
            f'<script type="text/plain" class="mv-modules" data-version="{version()}">{pack_modules(*modules)}</script>',
            f"<script>\n{loader()}globalThis.minivllmViz[{json.dumps(version())}].boot();\n</script>",
        ]
    return "\n".join(parts)


def document(title: str, body: str, heading: bool = True) -> str:
    """A whole HTML file around fragments. It follows the reader's light or dark setting. `heading`: show the title, also to those who see."""
    hidden = "" if heading else ' class="mv-live"'
    look = f"""
      :root {{ color-scheme: light dark; }}
      body {{ margin: 0 auto; padding: 20px clamp(12px, 2.5vw, 40px) 40px; max-width: 1720px; background: {LIGHT["page"]}; color: {LIGHT["ink"]}; font: 14px/1.5 system-ui, sans-serif; }}
      h1 {{ font-size: 20px; font-weight: 600; margin: 0 0 14px; }}
      @media (prefers-color-scheme: dark) {{ body {{ background: {DARK["page"]}; color: {DARK["ink"]}; }} }}
    """
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{html.escape(title)}</title>\n<style>{look}</style>\n</head>\n'
        f"<body>\n<main>\n<h1{hidden}>{html.escape(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def widget_module(*modules: str) -> str:
    """The same program as one ES module for anywidget (its `_esm`)."""
    given: dict[str, Any] = {"modules": sources(*modules), "styles": styles()}
    return (
        f"{loader()}\nconst given = {json.dumps(given)};\nconst loader = globalThis.minivllmViz[{json.dumps(version())}];\n"
        "loader.add(given.modules, given.styles);\n"
        'export default { async render({ model, el }) { return (await loader.load("mount")).mountWidget(model, el, loader.load); } };\n'
    )
