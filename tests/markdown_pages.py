"""The code of the pages in docs/."""

import re

from conftest import ROOT


def sections(page: str) -> dict[str, str]:
    """The text of each section of a page, by its title."""
    _, *parts = re.split(r"^## (.*)\n", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2]))


def blocks(text: str, language: str) -> list[str]:
    """Pieces of code, in their order."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def fenced(text: str, language: str) -> str:
    """These as one program."""
    return "\n\n".join(blocks(text, language))


def side(diff: str, sign: str) -> str:
    """The program before ("-") or after ("+") a diff."""
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] in (sign, " ", ""))
