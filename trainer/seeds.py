"""--seeds, in the process that the user started: the same command line for several seeds, one run after the other.

What was interrupted, or has failed, continues when the command is given again; what has succeeded is skipped.
"""

import argparse
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import mpi_util
from mpi_util_spinup.files import read, replace_file
from mpi_util_spinup.run_utils import ExperimentError, ExperimentGrid
from mpi_util_spinup.table import say
from trainer.command_line import parse
from trainer.display import counted
from trainer.run_folder import RunFolder, checkpoints

WORDS = "seeds.json"  # in a run's folder: the command line with which it began


def numbers(text: str) -> list[int]:
    """Seeds: "0-4" or "0,3,5-7". Raises ValueError: another text, or a range without a seed."""
    ranges = [part.split("-") for part in text.split(",")]
    if any(len(ends) > 2 or int(ends[0]) > int(ends[-1]) for ends in ranges):
        raise ValueError(text)
    return [n for ends in ranges for n in range(int(ends[0]), int(ends[-1]) + 1)]


def several_seeds(program: str, arguments: list[str]) -> int:
    """Runs the command line once for each of its --seeds. Returns the exit status: 1 if a run has failed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = lambda message: parser.exit(2, f"train.py: {message}; --seeds takes 0-4 or 0,1,7\n")  # type: ignore[method-assign]
    parser.add_argument("--seeds", type=numbers, required=True)
    parser.add_argument("--name")  # the runs get its folders as --run_dir
    own, words = parser.parse_known_args(arguments)
    config = parse(words + (["--name", own.name] if own.name else []))
    if config.resume or config.run_dir or "--seed" in {word.partition("=")[0] for word in words}:
        parser.exit(2, "train.py: --seeds makes new runs with these seeds; leave out --resume, --run_dir and --seed\n")
    folders = str(RunFolder.default_path(config.env, 0, config.name or config.algo)).removesuffix("0")
    grid: Any = ExperimentGrid()
    grid.print = lambda: say(f"{counted(len(own.seeds), 'run')}: --seed {' '.join(map(str, own.seeds))}\n")
    for key, value in {"program": os.path.abspath(program), "words": tuple(words), "seed": own.seeds}.items():
        grid.add(key, value)
    try:
        grid.run(run_one, data_dir=folders + "{seed}")
    except (mpi_util.UsageError, ExperimentError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1 if isinstance(error, ExperimentError) else 2
    say(f"\ncurves: {shlex.join([sys.executable, '-m', 'mpi_util_spinup.plot', folders])}\n")
    return 0


def run_one(program: str, words: tuple[str, ...], seed: int, logger_kwargs: dict[str, str]) -> None:
    """Becomes train.py: a new run, or the interrupted one in the folder. UsageError: that one has other arguments."""
    folder = Path(logger_kwargs["output_dir"]).absolute()
    command, begun = [*words, "--seed", str(seed)], folder / WORDS
    if checkpoints(folder):
        if not begun.exists() or read(begun) != json.dumps(command).encode():
            raise mpi_util.UsageError(f"{folder} holds a run with other arguments; remove it, or give another --name")
        command, given = ["--resume", str(folder), *({"--trust"} & {*words})], vars(parse([*words]))
        command += [f"--{name}={given[name]}" for name in ("nprocs", "hosts", "hostfile", "log_dir") if given[name]]
    else:
        replace_file(begun, json.dumps(command).encode())
        command += ["--run_dir", str(folder)]
    command = [sys.executable, program, *command]
    say(f"+ {shlex.join(command)}\n")
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    os.execv(sys.executable, command)  # noqa: S606  # signals and status are the run's own
