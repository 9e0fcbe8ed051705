"""Links of the pages in `site/docs`: on GitHub they lead to sources in the repository, on the site to the pages made of these."""

import re
from pathlib import PurePath, PurePosixPath

# A part of the book stands in the first page as `### 3. The scheduler`, and a replay in its script.
PAGES = [
    (r"nbs/index\.ipynb#(\d)-.*", r"/book/part_0\1.md"),
    (r"nbs/index\.ipynb#(\d\d)-.*", r"/book/part_\1.md"),
    (r"nbs/(.*\.ipynb.*)", r"/book/\1"),
    (r"site/replays\.py#(\w+)", r"/gallery/\1.md"),
    (r"site/replays\.py", "/gallery/index.md"),
    (r"benchmarks/results", "/benchmarks.md"),
    (r"(tests/.*)\.py", r"/\1.md"),
]


def page_of(source: str) -> str | None:
    """The page that a path of the repository becomes, or None if it becomes none."""
    for pattern, page in PAGES:
        if re.fullmatch(pattern, source):
            return re.sub(pattern, page, source)
    module = re.fullmatch(r"(?:kernels/)?(minivllm\w*(?:/\w+)*?)(?:/__init__)?\.py", source)
    return f"/api/{module[1].replace('/', '.')}.rst" if module else None


def sources(text: str) -> list[str]:
    """The links of a page that lead out of its folder's tree, as they stand: `../../nbs/...`."""
    return re.findall(r"\]\(((?:\.\./)+[^)]*)\)", text)


def on_site(text: str, folder: PurePath) -> str:
    """A page with its links as the site wants them.

    Args:
        text: Markdown. folder: the page's folder in the repository, such as `site/docs/guides`.

    Raises:
        ValueError: a link leads to something that has no page.
    """
    for link in set(sources(text)):
        parts = [*folder.parts]
        for step in PurePosixPath(link).parts:
            parts = parts[:-1] if step == ".." else [*parts, step]
        source = "/".join(parts)
        page = f"/{source.removeprefix('site/docs/')}" if source.startswith("site/docs/") else page_of(source)
        if page is None:
            raise ValueError(f"{folder}: a link to {source}, of which no page is made")
        text = text.replace(f"]({link})", f"]({page})")
    return text
