"""--seeds: the same command line for several seeds, as a grid."""

import argparse
import os
import sys
from typing import NoReturn

from trainer.config import parse
from trainer.run_folder import RunFolder


def numbers(text: str) -> list[int]:
    """Seeds: "0-4" or "0,3,5-7". Raises ValueError: another text, or a range without a seed."""
    ranges = [part.split("-") for part in text.split(",")]
    if any(int(ends[0]) > int(ends[-1]) for ends in ranges):
        raise ValueError(text)
    return [n for ends in ranges for n in range(int(ends[0]), int(ends[-1]) + 1)]


def several_seeds(program: str, arguments: list[str]) -> NoReturn:
    """Runs the command line once for each of its --seeds, one after the other: becomes a grid. Status 2: bad usage."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = lambda message: parser.exit(2, "train.py: --seeds: give them as 0-4 or 0,1,7\n")  # type: ignore[method-assign]
    parser.add_argument("--seeds", type=numbers)
    own, rest = parser.parse_known_args(arguments)
    config = parse(rest)
    if config.resume or config.run_dir:
        parser.exit(2, "train.py: --seeds starts new runs in folders of their own; leave out --resume and --run_dir\n")
    folders = str(RunFolder.default_path(config.env, 0, config.name or config.algo)).removesuffix("0") + "{seed}"
    grid = ["grid", program, *rest, "--seed", *map(str, own.seeds), "--data_dir", folders]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    os.execv(sys.executable, [sys.executable, "-m", "mpi_util", *grid])  # noqa: S606  # this interpreter
