"""The code of the pages in docs/."""

import re

from conftest import ROOT


def sections(page: str) -> dict[str, str]:
    """The text of each section of a page, by its title."""
    _, *parts = re.split(r"^## (.*)\n", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2]))


def fenced(text: str, language: str) -> str:
    return "\n\n".join(re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL))


def side(diff: str, sign: str) -> str:
    """The program before ("-") or after ("+") a diff."""
    return "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] in (sign, " ", ""))
