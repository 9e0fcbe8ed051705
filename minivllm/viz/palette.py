"""Colour palette for light and dark mode."""

# Generated from nbs/viz/palette.ipynb; after an edit here run `python -m minivllm.literate write-back`.

LIGHT = {
    "page": "#f6f7f9", "panel": "#ffffff", "raised": "#f3f5f8", "ink": "#1b1f26", "muted": "#59626f", "line": "#d3d8df",
    "accent": "#1f5fd0", "warning": "#a8480a",
    "owner-0": "#1a3fa2", "owner-1": "#ee677b", "owner-2": "#2c9ecd", "owner-3": "#611b59",
    "owner-4": "#ad6403", "owner-5": "#6264d5", "owner-6": "#75586f", "owner-7": "#940b00",
    "free": "#8b94a1", "prefill": "#47505e", "decode": "#838c99", "waiting": "#8a93a0",
}  # fmt: skip
DARK = {
    "page": "#0e1116", "panel": "#14171c", "raised": "#1e232b", "ink": "#e8ebf0", "muted": "#a3acb9", "line": "#363d48",
    "accent": "#7fb0ff", "warning": "#f0a35e",
    "owner-0": "#bcb9ff", "owner-1": "#f08503", "owner-2": "#45ba98", "owner-3": "#f0ef5c",
    "owner-4": "#ac6fde", "owner-5": "#a0fbf4", "owner-6": "#3c7e80", "owner-7": "#bd4609",
    "free": "#737d8c", "prefill": "#c9d0da", "decode": "#7b8593", "waiting": "#6f7987",
}  # fmt: skip
for _colours, _amber, _purple in ((LIGHT, "owner-4", "owner-3"), (DARK, "owner-1", "owner-4")):
    _same = {"cached": "free", "null": "free", "finished": "ink", "preempted": _amber, "swapped": _purple}
    _colours |= {name: _colours[other] for name, other in _same.items()}
NUM_OWNER_COLOURS = 8
DECODE_TINT = 0.62  # how much of a request's colour is left where it decodes


def owner_colour(number: int, dark: bool = False) -> str:
    """The colour of the `number`-th request, as "#rrggbb". The pages' `ownerColour` is the same rule."""
    return (DARK if dark else LIGHT)[f"owner-{number % NUM_OWNER_COLOURS}"]


def tint(colour: str, share: float, dark: bool = False) -> str:
    """A colour mixed with the panel's: `share` of it is left. The pages' `tint` is the same rule."""
    under = (DARK if dark else LIGHT)["panel"]
    parts = [(int(colour[i : i + 2], 16), int(under[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in parts)


def style_sheet() -> str:
    """The palette as CSS variables: --mv-ink and so on, under `.mv-card[data-theme=...]`."""
    rules = []
    for theme, colours in (("light", LIGHT), ("dark", DARK)):
        body = " ".join(f"--mv-{name}: {value};" for name, value in colours.items())
        card, page = (f'[data-theme="{theme}"].mv-{kind}' for kind in ("card", "page"))
        rules.append(f"{card}, {page} {{ color-scheme: {theme}; {body} }}")
    return "\n".join(rules) + "\n"
