"""Gather the pages of the documentation site for Sphinx: those written by hand in `site/docs`, the book, the reference, the gallery,
the benchmarks.

python site/pages.py site/_pages && sphinx-build -c site site/_pages site/_build/html
"""

import re
import shutil
import sys
from pathlib import Path

# The modules beside this file, also where a test runs it.
sys.path.insert(0, str(Path(__file__).parent))

import runs
from api import make_api
from book import make_book
from links import on_site
from replays import make_gallery
from results import make_benchmarks, table

from minivllm.literate import write
from minivllm.models.families.registry import TESTED, families
from minivllm.viz import BlockMap, Timeline

ROOT = Path(__file__).parents[1]
MODELS = (
    "What `minivllm models` prints. The last column says what of a small random model of each architecture is compared with `transformers`, in ragged"
    " batches with chunked prompts, prefix hits and preemption; a test refuses a family that is not. Quantized safetensors load into the linear layers"
    " of any family. Any other causal model whose attention `transformers` lets others compute runs by its code there (`model_impl`)."
    " Left out are Gemma 3n and 4, whose layers are built otherwise than those of any other family, and encoder-decoders such as Whisper, whose error names the"
    " cross-attention that they need."
)
MODELS_HEAD = ("Family", "Architectures", "Checkpoints", "Compared with transformers")


def make_tests(target: Path) -> None:
    """Write a page for every test that the pages name: its source."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "site/docs").rglob("*.md"))
    for path in sorted(set(re.findall(r"\]\((?:\.\./)+(tests/[^)]*\.py)\)", pages))):
        fence = "`" * 8
        text = (ROOT / path).read_text(encoding="utf-8")
        lines = ["---", "orphan: true", "---", "", f"# {path}", "", f"{fence}python", text.rstrip(), fence, ""]
        write(target / path.replace(".py", ".md"), "\n".join(lines))


def make_models(target: Path) -> None:
    """Write the page of model families."""
    rows = [
        (
            family.about,
            ", ".join(f"`{name}`" for name in family.architectures),
            ", ".join(family.formats),
            TESTED[family.kind],
        )
        for family in families()
    ]
    write(target / "models.md", "\n".join(["# Model families", "", MODELS, "", *table(MODELS_HEAD, rows)]))


def main(target: Path) -> None:
    """Write the sources of all pages into `target`, which is emptied first."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "site/docs", target)
    for page in target.rglob("*.md"):
        folder = Path("site/docs") / page.parent.relative_to(target)
        write(page, on_site(page.read_text(), folder))
    trace = runs.load()
    write(target / "_blocks.html", BlockMap(trace).to_html())
    write(target / "_requests.html", Timeline(trace).to_html())
    chapters = make_book(ROOT, target / "book")
    make_api(ROOT, target / "api", chapters)
    make_gallery(target / "gallery", target / "_extra/replays")
    make_benchmarks(ROOT, target)
    make_tests(target)
    make_models(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
