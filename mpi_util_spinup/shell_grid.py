"""Runs a script once for each combination of options, from the shell.

    python -m mpi_util grid train.py Hopper-v4 --seed 0 1 2 --lr 3e-4 1e-3 --max_parallel 2
    python -m mpi_util grid program.py --seed 0 1 2 --out {dir}/result.json

Every option of the script that has several values varies; the last one varies fastest. {dir} stands for the folder of
the run, DATA_DIR/NAME/NAME_s<seed>, or DATA_DIR with {seed} in it; train.py gets it as --run_dir. What was
interrupted, or has failed, continues when it is started again: what has succeeded is skipped, and train.py resumes.
"""

import argparse
import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from mpi_util.errors import UsageError

from .experiment import ExperimentError
from .files import replace_file
from .grid import ExperimentGrid, valid_str

_COMMAND = "grid.json"  # in a run's folder


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status: 1 if a run has failed."""
    parser = argparse.ArgumentParser(
        prog="mpi_util grid", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s SCRIPT [ARGUMENT ...] [--OPTION VALUE [VALUE ...]] ... [--max_parallel N] ...",
    )  # fmt: skip
    parser.add_argument("script", metavar="SCRIPT", help="of Python; its options follow")
    parser.add_argument("--max_parallel", type=int, default=1, metavar="N", help="runs at once (default: 1)")
    parser.add_argument("--name", help="with which the folders begin (default: from script and arguments)")
    parser.add_argument("--data_dir", default="data", metavar="DIR", help="of the folders (default: data)")
    parser.add_argument("--redo", action="store_true", help="run what has succeeded before, too")
    parser.error = lambda message: parser.exit(2, f"mpi_util grid: {message} (see --help)\n")  # type: ignore[method-assign]
    own, others = parser.parse_known_args(arguments)
    script = Path(own.script).resolve()
    try:
        if not script.is_file():
            raise UsageError(f"there is no file {own.script}")
        positional, options = split(others)
        grid = _Grid(own.name or valid_str([script.stem, *positional]))
        grid.add("script", str(script))
        grid.add("positional", tuple(positional))
        for option, values in options.items():  # a run's folder is named by `seed`, as a function's is
            grid.add("seed" if option == "--seed" else option, values or [""], option.strip("-"))
        results = grid.run(_run, 1, own.data_dir, max_parallel=own.max_parallel, redo=own.redo)
        begin, seed, _ = own.data_dir.partition("{seed}")
        ran = (run.folder.parent for run in results if any(run.folder.glob("progress*.txt")))
        tops = sorted({begin if seed else str(parent) for parent in ran})
        if tops:
            print(f"\ncurves: {shlex.join([sys.executable, '-m', 'mpi_util', 'plot', *tops])}")
    except UsageError as error:
        parser.error(str(error))
    except ExperimentError as error:
        print(f"mpi_util grid: {error}", file=sys.stderr)
        return 1
    return 0


class _Grid(ExperimentGrid):
    """A grid that prints what varies in one line."""

    def print(self) -> None:
        """Prints it."""
        vary = (f"--{name} {' '.join(vals)}" for name, vals in zip(self.shs, self.vals) if len(vals) > 1)
        print(f"{len(self.variants())} runs: {'; '.join(vary) or 'nothing varies'}", flush=True)


def split(words: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """(positional arguments, values by option as it was written). Raises UsageError: an option is given twice."""
    positional: list[str] = []
    options: dict[str, list[str]] = {}
    values = positional
    for word in words:
        if re.match(r"-+[a-zA-Z_]", word) and word[1:].lower() not in ("inf", "nan"):  # numbers are values
            option, equals, value = word.partition("=")
            if option in options:
                raise UsageError(f"{option} is given twice; give its values together: {option} A B")
            values = options[option] = [value] if equals else []
        else:
            values.append(word)
    return positional, options


def _run(script: str, positional: tuple[str, ...], seed: Any, logger_kwargs: dict[str, str], **options: str) -> None:
    """In a process of its own: becomes the script. seed: 0 stands for none."""
    folder = Path(logger_kwargs["output_dir"]).resolve()
    words = list(positional)
    for option, value in (options | ({"--seed": seed} if isinstance(seed, str) else {})).items():
        words += [option, value] if value else [option]
    words = [word.replace("{dir}", str(folder)) for word in words]
    if Path(script).name == "train.py" and (Path(script).parent / "trainer" / "config.py").exists():
        words = _of_train(folder, words)
    print(f"+ {shlex.join([sys.executable, script, *words])}", flush=True)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, script, *words])  # noqa: S606  # signals and status are the script's own


def _of_train(folder: Path, words: list[str]) -> list[str]:
    """train.py's arguments: of a new run, or to resume the one in the folder. UsageError: it has other settings."""
    path = folder / _COMMAND
    if any(folder.glob("checkpoint*.safetensors")):
        before = json.loads(path.read_text()) if path.exists() else None
        if before != words:
            raise UsageError(f"{folder} holds a run with other arguments; remove it, or give another --name")
        return ["--resume", str(folder)]
    try:
        replace_file(path, json.dumps(words).encode())
    except OSError as error:
        raise UsageError(f"cannot write to the run folder {folder}: {error.strerror}") from None
    return [*words, "--run_dir", str(folder)]
