"""The documentation as a site: it is built without a warning, and its messages and defaults are those of the code."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, run

from policies.hyper import DEFAULTS
from trainer.config import Config

PAGE = ROOT / "docs" / "troubleshooting.md"
PACKAGES = ("mpi_util", "mpi_util_spinup", "mpi_util_weight_sync", "mpi_util_sb3", "trainer", "policies")
CODE = [*sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))]
CODE.append(ROOT / "train.py")
VARIES = "\0"  # stands for what a message puts in
OPTIONS = {"help", "description", "epilog", "metavar"}  # arguments with texts of --help
LEAST_WORDS = 3
# texts of three words and more that are never printed as a message of their own
OTHERS = re.compile(
    r"#!/bin/sh|\{ echo|import |def read|No module named|cannot load MPI library"  # programs, and what others say
    r"|.*\\[dSw)]|\(\?<=|\*\*\* An error occurred"  # patterns
    r"|-hosts \{|-genv |-bind-to|--map-by|--host \{|--oversubscribe|--overlap --nodes|HYDRA build"  # launchers' options
    r"|MPI\.Comm \||Mapping\[int, |Evaluator \||module \0 has no attribute|%\(|true or false|a number of "
    r"|python -m mpi_util|example: python|Train a policy on N|the run: these may change"
    r"|mpi_util (stack|weight sync:)|Kinds of messages|Byte offset"
    # pictures' and the panel's labels, settings, lists of commands
    r"|outside lower"
    r"|(\w+ ){1,6}(num_cpu|num_env|max_steps|n_episodes|horizon|clip_ratio|update_epochs|net_arch|env_name)"
    r"|seed run_dir"
    r"|return in training|environment steps per|seconds of an|\[bold\]|KL \0, entropy|\0 \0 after \0; no limit"
    r"|instead, or besides|\.\*is out of date|mpi_util_spinup\.\w+$|train\.py --watch$"
    r"|train a policy on N|play what a run|will a job run|curves of runs|run a script once|usage: python -m"
    r"|Episode \0 \t"
)


def words(text: str) -> int:
    return len(re.findall(r"[A-Za-z]{2,}", text))


def plain(text: str) -> str:
    """Without what Markdown and the width of lines add."""
    return re.sub(r"\s+", " ", text.replace("`", "").replace("\\|", "|"))


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the text of each string that may be a message, with VARIES for what is put in."""
    tree, skipped = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):  # a docstring
            skipped.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            skipped |= {part for part in node.values if isinstance(part, ast.Constant)}
        elif getattr(node, "arg", "") in OPTIONS or getattr(getattr(node, "func", None), "id", "") == "setting":
            skipped |= set(ast.walk(node))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else VARIES for part in node.values)
        else:
            continue
        if " " in text.strip() and words(text) >= LEAST_WORDS and not OTHERS.match(text.strip()):
            yield node.lineno, text


def pattern(text: str) -> str:
    """What finds a message on the page, whatever stands there for what is put in."""
    parts = (re.escape(plain(part)) for part in text.strip(VARIES + " \n:;").split(VARIES))
    return ".{0,120}?".join(parts)


def test_troubleshooting_has_every_message():
    page = plain(PAGE.read_text())
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for path in CODE
        for line, text in texts(path)
        if not re.search(pattern(text), page)
    ]
    assert not missing, "add to docs/troubleshooting.md:\n" + "\n".join(missing)


def test_troubleshooting_has_no_message_that_is_gone():
    known = [pattern(text) for path in CODE for _, text in texts(path)]
    tables = PAGE.read_text().split("| message | cause")[1:]
    cells = [row.split(" | ")[0] for table in tables for row in table.split("\n\n")[0].splitlines()[2:]]
    shown = [plain(text) for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    assert len(shown) > 250
    gone = [text for text in shown if words(text) >= LEAST_WORDS and not any(re.search(one, text) for one in known)]
    assert not gone, gone


def test_the_defaults_of_each_algorithm_are_those_of_the_code():
    table = (ROOT / "docs" / "train.md").read_text().partition("## Hyperparameters: defaults of each algorithm\n\n")[2]
    head, _, *rows = table.partition("\n\n")[0].splitlines()
    names = [cell.strip() for cell in head.strip("|").split("|")][1:]
    assert names == list(DEFAULTS)
    shown = {}
    for row in rows:
        setting, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        shown[setting.strip("`")] = cells
    assert {name for own in DEFAULTS.values() for name in own} <= shown.keys()
    for setting, cells in shown.items():
        for algo, cell in zip(names, cells, strict=True):
            config = Config.of(algo)
            value = "" if setting in config.unused else getattr(config, setting)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            assert cell == ("" if value is None else f"{value:g}" if is_number else str(value)), (setting, algo)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    found = subprocess.run([sys.executable, "-c", "import material, mkdocs, mkdocstrings_handlers.python"])
    assert found.returncode == 0, "the site needs the extra docs: pip install -c constraints.txt -e '.[docs]'"
    done = run([sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path], 200, {"NO_MKDOCS_2_WARNING": "1"})
    assert done.status == 0, done.err
    for page in (ROOT / "docs").glob("*.md"):
        assert (tmp_path / f"{page.stem}.html").exists(), page.name
    api = (tmp_path / "api.html").read_text()
    import mpi_util

    undocumented = [name for name in mpi_util.__all__ if not re.search(rf"\b{name}\b", api)]
    assert not undocumented
    for path in tmp_path.glob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?://[^\s\">]+)", path.read_text())
        assert not [url for url in loaded if "rel=canonical" not in url], path.name
