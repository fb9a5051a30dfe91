"""The programs of examples/ run as their README says, on several ranks, which stay in step."""

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, mpi_environment, run

from mpi_util.logx import load_weights

EXAMPLES = ROOT / "examples"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
STEPS, EPOCHS = 201, 2  # shares of different sizes on 2 and 4 ranks
WEIGHTS = {"torch": "pyt_save/model.npz", "tf1": "tf1_save/weights.npz"}
SPINNING_UP = {"ppo_torch", "vpg_torch", "ppo_tf1", "vpg_tf1", "trpo_tf1"}
COLUMNS = {
    "Epoch",
    "AverageEpRet",
    "MaxEpRet",
    "EpLen",
    "TotalEnvInteracts",
    "LossPi",
    "LossV",
    "Entropy",
    "KL",
    "Time",
}


def start(program: str, *arguments, mpi: str = "mpich") -> str:
    """Runs a program of examples/, requires that it ends well, and returns what it printed."""
    finished = run([sys.executable, EXAMPLES / f"{program}.py", *arguments], 150, {**QUIET, **mpi_environment(mpi)})
    assert finished.status == 0, f"{finished.out}\n{finished.err}"
    return finished.out


def checksums(out: str, what: str) -> dict[int, str]:
    """What --check prints, by rank."""
    return {int(rank): digits for rank, digits in re.findall(rf"\[rank +(\d+)\] {what} chksum (\w{{16}})", out)}


def table(folder: Path) -> list[dict[str, float]]:
    rows = csv.DictReader((folder / "progress.txt").read_text().splitlines(), delimiter="\t")
    return [{key: float(value) for key, value in row.items()} for row in rows]


@pytest.mark.parametrize(
    ("name", "env", "mpi", "n"),
    [
        ("ppo_torch", "CartPole-v1", "mpich", 1),
        ("ppo_torch", "Pendulum-v1", "mpich", 2),  # no rank ends an episode
        ("ppo_torch", "CartPole-v1", "mpich", 4),
        ("vpg_torch", "FrozenLake-v1", "mpich", 1),  # Discrete observations
        ("vpg_torch", "CartPole-v1", "openmpi", 2),
        ("ppo_tf1", "Pendulum-v1", "mpich", 1),
        ("ppo_tf1", "CartPole-v1", "mpich", 4),
        ("vpg_tf1", "CartPole-v1", "mpich", 2),
        ("trpo_tf1", "CartPole-v1", "mpich", 1),
        ("trpo_tf1", "Pendulum-v1", "openmpi", 2),
    ],
    indirect=["mpi"],
)
def test_spinning_up_program(name, env, mpi, n, tmp_path):
    limits = ("--steps", STEPS, "--epochs", EPOCHS, "--data_dir", tmp_path)
    out = start(f"adopt_{name}", "--env", env, "--cpu", n, *limits, "--check", mpi=mpi)

    found = checksums(out, "weights")
    assert set(found) == set(range(n)) and len(set(found.values())) == 1
    assert out.count("AverageEpRet") == EPOCHS  # one table a row, from rank 0

    folder = tmp_path / name / f"{name}_s0"
    rows = table(folder)
    assert [row["TotalEnvInteracts"] for row in rows] == [STEPS * (epoch + 1) for epoch in range(EPOCHS)]
    assert set(rows[0]) >= COLUMNS
    assert all(np.isfinite([row["LossPi"], row["LossV"], row["KL"], row["Entropy"]]).all() for row in rows)
    assert all(row["DeltaLossV"] < 0 for row in rows)
    if env == "CartPole-v1":
        assert all(9 <= row["MinEpRet"] <= row["AverageEpRet"] == row["EpLen"] <= row["MaxEpRet"] for row in rows)
    else:
        assert all(np.isnan(row["AverageEpRet"]) == (n > 1) for row in rows)

    config = json.loads((folder / "config.json").read_text())
    assert config["exp_name"] == name and config["steps_per_epoch"] == STEPS
    weights = load_weights(folder / WEIGHTS[name.partition("_")[2]])
    assert sum("pi" in key for key in weights) >= 6 and all(np.isfinite(array).all() for array in weights.values())
    if n == 1 and name in ("ppo_torch", "trpo_tf1"):
        assert "MaxEpRet" in start("adopt_test_policy", folder, "--episodes", 2)


@pytest.mark.parametrize(("env", "n"), [("Pendulum-v1", 1), ("CartPole-v1", 2)])
def test_program_of_2017(env, n):
    out = start("adopt_2017", env, "--nprocs", n, "-b", 3, "-n", 6, "--check")
    lines = [line for line in out.splitlines() if line.startswith("episode")]
    assert [line.split("\t")[0] for line in lines] == ["episode 3", "episode 6"]
    assert all(
        re.search(r"\treturn \S+\tsteps \d+\tkl \S+\tentropy \S+\tbeta \S+\tval_loss \d", line) for line in lines
    )
    for what in ("policy", "value"):
        found = checksums(out, what)
        assert set(found) == set(range(n)) and len(set(found.values())) == 1


def test_every_program_is_tried_and_in_the_readme():
    programs = {path.stem for path in EXAMPLES.glob("adopt_*.py")}
    assert programs == {f"adopt_{name}" for name in SPINNING_UP} | {"adopt_2017", "adopt_test_policy"}
    readme = (EXAMPLES / "README.md").read_text()
    assert all(f"`{program}.py`" in readme for program in programs)
