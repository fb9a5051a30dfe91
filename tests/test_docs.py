"""The site builds, its programs are programs, and the messages that it explains are those that there are."""

import ast
import re
import sys
import textwrap

import pytest
from conftest import ROOT, run

PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", tmp_path / "site"]
    done = run(command, 100, {"NO_MKDOCS_2_WARNING": "1"}, cwd=ROOT)
    assert done.status == 0, done.err
    home = (tmp_path / "site" / "index.html").read_text()
    assert "Bit-identical results" in home and (tmp_path / "site" / "learning" / "front.png").exists()
    api = (tmp_path / "site" / "api.html").read_text()
    assert "Collective: joins the batches of all ranks" in api
    assert "examples/gather_ppo_torch.html" in (tmp_path / "site" / "adopting.html").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_are_python(page):
    for section in PAGES[page].split("\n## "):
        blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        try:
            ast.parse("\n".join(blocks))  # a program in pieces
        except SyntaxError:
            for block in blocks:
                ast.parse(textwrap.dedent(block))


def test_an_environment_of_the_users_own_is_trained_in(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", PAGES["environments.md"], re.DOTALL)
    (tmp_path / "myenvs.py").write_text(program)
    command = [sys.executable, ROOT / "train.py", "myenvs:Mine-v0", "--nprocs", 2, "--total_steps", 2000]
    done = run(command, 60, cwd=tmp_path)
    assert done.status == 0, done.err


def messages():
    """The messages of docs/troubleshooting.md."""
    for line in PAGES["troubleshooting.md"].splitlines():
        if line.startswith("| `"):
            yield from re.findall(r"`([^`]+)`", line.split("|")[1])


def test_messages_that_are_explained_are_those_that_there_are():
    text = "\n".join(p.read_text() for folder in ("mpi_util", "trainer") for p in (ROOT / folder).rglob("*.py"))
    text = re.sub(r"\{[^{}\n]*(\{[^{}\n]*\}[^{}\n]*)*\}", "{}", re.sub(r"\"\s*\n\s*f?\"", "", text))
    lost = []
    for message in messages():
        parts = re.split(r"\d+|\bN\b|\bM\b|\bh2\b|\bsignal\b|SIG\w+|\.\.\.|[:;\[\]()]", message)
        lost += [(message, part.strip()) for part in parts if len(part.strip()) > 6 and part.strip() not in text]
    assert not lost, lost
