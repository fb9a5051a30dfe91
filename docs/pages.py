"""What the documentation site has beside the pages of docs/: a hook of mkdocs (mkdocs.yml).

    python -m mkdocs build --strict     # writes it to site/
    python -m mkdocs serve              # shows it, and builds it again after each change

The README is the first page, examples/README.md and each program there are pages, and pictures of benchmarks/results
are copied. Files say `../examples/x.py` and `docs/x.md`, as they do on GitHub; here such links become the site's.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]+)?\)")


def in_site(path: str) -> str:
    """The page or picture of the site that a file of the repository becomes; "": none does."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == "examples/README.md":
        return "examples/index.md"
    if path.startswith("examples/") and path.endswith(".py"):
        return path.removesuffix(".py") + ".md"
    return path if path.endswith(".png") else ""


def for_site(text: str, path: str) -> str:
    """A file's text with the links of the site, which show titles; those to what is not on it become plain text.

    Args: path: of the file, from the repository's root.
    """
    here = posixpath.dirname(in_site(path))

    def link(found: re.Match[str]) -> str:
        shown, target, anchor = found.groups()
        source = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if not (page := in_site(source)):
            return shown
        if re.fullmatch(r"(docs/)?\w+\.md", shown):  # a file's name means nothing on the site
            shown = (ROOT / source).read_text().splitlines()[0].removeprefix("# ")
        return f"[{shown}]({posixpath.relpath(page, here or '.')}{anchor or ''})"

    return LINK.sub(link, text)


def program(path: Path) -> str:
    """A page with a program of examples/; who searches for a word wants a page that explains it."""
    name = path.relative_to(ROOT).as_posix()
    head = "---\nsearch:\n  exclude: true\n---\n"
    return f"{head}# {path.name}\n\n[All programs](index.md)\n\n```python title={name!r}\n{path.read_text()}```\n"


def on_files(files: Files, config: Any) -> Files:
    """mkdocs asks for the files of the site."""
    made = {path: (ROOT / path).read_text() for path in ("README.md", "examples/README.md")}
    made = {in_site(path): for_site(text, path) for path, text in made.items()}
    for path in sorted((ROOT / "examples").glob("*.py")):
        made[in_site(path.relative_to(ROOT).as_posix())] = program(path)
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    for path in sorted((ROOT / "benchmarks" / "results" / "learning").glob("*.png")):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs is going to make a page of this text. The search finds pages that explain before those that list."""
    if page.file.src_uri in ("troubleshooting.md", "api.md", "learning.md"):
        page.meta["search"] = {"boost": 0.1}
    return markdown if page.file.generated_by else for_site(markdown, f"docs/{page.file.src_uri}")
