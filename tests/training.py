"""Runs train.py as its user does, and reads what it has written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, mpi_environment, run

TIME_COLUMNS = ("Time", "StepsPerSecond", "RolloutS", "GatherS", "UpdateS", "BcastS", "IdleShare")
FRAMEWORKS = [pytest.param("torch", marks=pytest.mark.torch), pytest.param("tf", marks=pytest.mark.tensorflow)]
EPISODES = ["Hopper-v4", "-n", 24, "-b", 8]
SEGMENTS = ["Hopper-v4", "--total_steps", 900, "--batch_steps", 300, "--num_envs", 10]
ODD = ["tests.envs:Uneven-v0", "-n", 60, "--algo", "ppo-kl", "--valfunc_hid_list", "auto", "--seed", 3]
FRESH = ["tests.envs:Tiring-v0", "-n", 24, "-b", 8, "--fresh_env"]


def train(*arguments, mpi: str = "mpich", timeout: float = 120, status: int = 0, env: dict | None = None):
    """Runs train.py and requires its status."""
    command = [sys.executable, "train.py", *arguments]
    done = run(command, timeout, {**mpi_environment(mpi), **(env or {})})
    assert done.status == status, f"status {done.status}\n{done.out}\n{done.err}"
    return done


def rows(folder: Path) -> list[dict[str, str]]:
    """progress.txt without the columns of time."""
    lines = [line.split("\t") for line in (folder / "progress.txt").read_text().splitlines()]
    assert all(0 <= float(line[lines[0].index("IdleShare")]) < 1 for line in lines[1:])
    return [{k: v for k, v in zip(lines[0], line) if k not in TIME_COLUMNS} for line in lines[1:]]


def start(folder: Path, n: int, mpi: str = "mpich", before: str = "") -> subprocess.Popen:
    """train.py on n ranks, started by a shell that has run `before`; it has printed the row of iteration 2."""
    process = subprocess.Popen(
        ["bash", "-c", f'{before}\nexec "$@"', "-", sys.executable, "train.py", "Hopper-v4", "--nprocs", str(n)]
        + ["--run_dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, **mpi_environment(mpi)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_row(process, 2)
    return process


def wait_for_row(process: subprocess.Popen, iteration: int) -> None:
    """Reads what train.py prints up to the row of this iteration."""
    while not (line := process.stdout.readline()).startswith(f"{iteration:6} "):
        assert line, process.stderr.read()
