"""Colour palette for light and dark mode, checked for colour blindness and contrast."""

# Generated from nbs/viz/palette.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from __future__ import annotations

import re

import numpy as np

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
        rules.append(
            f'[data-theme="{theme}"].mv-card, [data-theme="{theme}"].mv-page {{ color-scheme: {theme}; {body} }}'
        )
    return "\n".join(rules) + "\n"


_SIGHT = {
    "normal": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip
_CONES = np.array([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566], [0.0883024619, 0.2817188376, 0.6299787005]])  # fmt: skip
_LAB = np.array([[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099], [0.0259040371, 0.7827717662, -0.8086757660]])  # fmt: skip


def _linear(colour: str) -> np.ndarray:
    if not re.fullmatch("#[0-9a-f]{6}", colour):
        raise ValueError(f"a colour is written #rrggbb in lower case, got {colour!r}")
    share = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """Contrast ratio of two colours by WCAG 2, 1 to 21."""
    low, high = sorted(float(_linear(colour) @ (0.2126, 0.7152, 0.0722)) for colour in (a, b))
    return (high + 0.05) / (low + 0.05)


def difference(a: str, b: str, sight: str = "normal") -> float:
    """Distance of two colours in OKLab (black and white are 1 apart), as seen with normal sight or with a colour blindness."""
    points = [np.cbrt((_SIGHT[sight] @ _linear(colour)).clip(0, 1) @ _CONES.T) @ _LAB.T for colour in (a, b)]
    return float(np.linalg.norm(points[0] - points[1]))


def least_difference(colours: list[str]) -> float:
    """The least difference of any two colours, over all kinds of sight."""
    pairs = [(a, b) for i, a in enumerate(colours) for b in colours[:i]]
    return min(difference(a, b, sight) for a, b in pairs for sight in _SIGHT)
