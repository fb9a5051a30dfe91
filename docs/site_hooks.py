"""For mkdocs: what lies outside docs/ becomes part of the site, and links to it lead there."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# links of the repository -> links of the site, from a page in docs/
LINKS = [
    (r"\]\(\.\./examples/(\w+)\.py\)", r"](examples/\1.md)"),
    (r"\]\(\.\./examples/(README\.md)?\)", "](examples/README.md)"),
    (r"\]\(\.\./benchmarks/results/learning/", "](learning/"),
    (r"\]\(\.\./README\.md\)", "](index.md)"),
    (r"\[([^]]*)\]\(\.\./[^)]*\)", r"\1"),
]
OF_README = [
    (r"\]\(docs/", "]("),
    (r"\]\(examples/(\w+)\.py\)", r"](examples/\1.md)"),
    (r"\]\(examples/\)", "](examples/README.md)"),
    (r"\]\(benchmarks/results/learning/", "](learning/"),
    (r"\[([^]]*)\]\((?:benchmarks|mpi_util|tests)[^)]*\)", r"\1"),
]
OF_EXAMPLES = [
    (r"\]\((\w+)\.py\)", r"](\1.md)"),
    (r"\]\(\.\./docs/", "](../"),
    (r"\[([^]]*)\]\(\.\./(?!\w+\.md)[^)]*\)", r"\1"),
]


def on_files(files: Files, config: Any) -> Files:
    """Adds the README as the first page, each example as a page, and the pictures."""
    pages = {"index.md": _with(OF_README, ROOT / "README.md")}
    pages["examples/README.md"] = _with(OF_EXAMPLES, ROOT / "examples" / "README.md")
    for path in sorted((ROOT / "examples").glob("*.py")):
        pages[f"examples/{path.stem}.md"] = f"# {path.name}\n\n````python\n{path.read_text()}````\n"
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    for path in sorted((ROOT / "benchmarks" / "results" / "learning").glob("*.png")):
        files.append(File.generated(config, f"learning/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page with its links led to the site."""
    return markdown if page.file.src_uri in ("index.md",) or "/" in page.file.src_uri else _led(LINKS, markdown)


def _with(links: list[tuple[str, str]], path: Path) -> str:
    return _led(links, path.read_text())


def _led(links: list[tuple[str, str]], text: str) -> str:
    for pattern, link in links:
        text = re.sub(pattern, link, text)
    return text
