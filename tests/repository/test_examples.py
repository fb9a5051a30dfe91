"""The programs of examples/ run as their README says, on several ranks, which stay in step or have the same bits."""

import csv
import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, mpi_environment, run
from markdown_pages import blocks, fenced, sections, side

from mpi_util_spinup.logx import load_weights

EXAMPLES = ROOT / "examples"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
STEPS, EPOCHS = 201, 2  # shares of different sizes on 2 ranks
WEIGHTS = {"torch": "pyt_save/weights.npz", "tf1": "tf1_save/weights.npz"}
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "env", "mpi", "n"),
    [
        ("ppo_torch", "CartPole-v1", "mpich", 2),
        ("vpg_torch", "FrozenLake-v1", "mpich", 1),  # Discrete observations
        ("vpg_torch", "CartPole-v1", "openmpi", 2),
        ("ppo_tf1", "CartPole-v1", "mpich", 2),
        ("vpg_tf1", "CartPole-v1", "mpich", 1),
        ("trpo_tf1", "Pendulum-v1", "openmpi", 2),  # no rank ends an episode
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
        assert "MaxEpRet" in start("adopt_test_policy", folder, "--episodes", 2, "--trust")


@pytest.mark.tensorflow
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


# Settings with which a program learns something in seconds, with the same bits at any size.
TEACHING = {
    "same_bits": "--iterations 5",
    "gather_ppo_torch": "--episodes 12 --stop_at 40",
    "gather_ppo_jax": "--episodes 12 --iterations 5",
    "cross_entropy": "--candidates 30 --iterations 12",
    "keras_reinforce": "--episodes 20 --iterations 5",
    "vector_envs": "--iterations 5",
    "gpu_on_rank0": "--episodes 10 --iterations 6 --hidden 32",
}


SIMULATORS = {"simulators", "kuramoto", "kuramoto_mpmd", "cavity_openfoam", "heat_dolfinx"}  # in tests/simulators


def read(out: str) -> tuple[list[float], str]:
    """The mean returns that a program printed, and the checksum of its weights, which is its last line."""
    returns = [float(x) for x in re.findall(r"^iteration \d+: return (\S+?),? ", out, re.MULTILINE)]
    return returns, re.fullmatch(r"checksum (\w{16})", out.splitlines()[-1])[1]


@pytest.mark.slow_unless(name="same_bits")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.jax) if "jax" in name else name for name in TEACHING]
)
def test_it_learns_with_the_same_bits_on_one_and_three_ranks(name):
    alone, three = (start(name, "--nprocs", n, *TEACHING[name].split()) for n in (1, 3))
    returns, weights = read(alone)
    assert len(returns) >= 3 and returns[-1] > 1.3 * returns[0]
    assert read(three) == (returns, weights)
    if name == "gather_ppo_torch":
        assert returns[-2] < 40 <= returns[-1]  # rank 0 said stop, and all ranks did
    if name == "gpu_on_rank0":
        assert {f"[rank {k}] has CUDA open: False" for k in (1, 2)} <= set(three.splitlines())


def code(text: str) -> list[str]:
    """The lines, without the marks and what follows them."""
    return [line.partition("  # +")[0].rstrip() for line in text.splitlines()]


def adopting() -> tuple[list[str], list[str]]:
    """The diffs of gather_ppo_torch.py in docs/cleanrl.md, and the lines of code that are those of programs."""
    pages = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("cleanrl", "pitfalls", "gpu")}
    of_programs = pages["pitfalls"].partition("\n## Normalizers")[2].partition("\n## Logging")[0] + pages["gpu"]
    plain = "\n".join(re.findall(r"```python\n(.*?)```", of_programs, re.DOTALL))
    return fenced(sections("cleanrl.md")["A rollout that is a function"], "diff").strip().split(
        "\n\n"
    ), plain.splitlines()


def before() -> str:
    """gather_ppo_torch.py as it was for one process, by the diffs of docs/cleanrl.md."""
    diffs = adopting()[0]
    shown = {line[1:] for diff in diffs for line in diff.splitlines() if line[0] == "+"}
    lines = (EXAMPLES / "gather_ppo_torch.py").read_text().splitlines()
    program = "\n".join(x for x in lines if "  # +" not in x or code(x)[0] in shown)
    program = "\n".join(code(program)) + "\n"
    for diff in diffs:
        old, new = (side(diff, sign) for sign in "-+")
        assert program.count(new) == 1, f"not in the program, or twice:\n{new}"
        program = program.replace(new, old)
    return program


def test_what_the_docs_show_is_in_the_programs():
    marked = [line for line in (EXAMPLES / "gather_ppo_torch.py").read_text().splitlines() if "  # +" in line]
    diffs, plain = adopting()
    added, removed = ([x for diff in diffs for x in diff.splitlines() if x[0] == sign] for sign in "+-")
    assert {line[1:] for line in added} <= set(code("\n".join(marked)))
    assert f"gather_ppo_torch.py) | {len(marked)} | {len(removed)} |" in (ROOT / "docs" / "cleanrl.md").read_text()
    compile(before(), "before", "exec")
    assert "mpi_util." not in before()
    everywhere = {line.strip() for name in TEACHING for line in code((EXAMPLES / f"{name}.py").read_text())}
    assert plain and not {line.strip() for line in plain} - {line.partition("  #")[0] for line in everywhere}


def test_what_the_page_on_simulators_shows_is_in_the_programs():
    shown = "\n".join(blocks((ROOT / "docs" / "simulators.md").read_text(), "python")).splitlines()
    there = {line for name in SIMULATORS for line in code((EXAMPLES / f"{name}.py").read_text())}
    assert len(shown) > 15 and not set(shown) - there


@pytest.mark.slow
def test_the_program_before_adopting_learns_too(tmp_path):
    program = tmp_path / "before.py"
    program.write_text(before())
    done = run([sys.executable, program, *TEACHING["gather_ppo_torch"].split()], 150)
    assert done.status == 0, done.err
    returns = [float(x) for x in re.findall(r"return (\S+),", done.out)]
    assert returns[-1] >= 40 > returns[0]


@pytest.mark.slow
def test_an_evaluator_returns_results_with_their_versions():
    runs = [start("async_evaluator", "--iterations", 6, "--episodes", 30, "--eval_episodes", n) for n in (5, 5, 200)]
    found = [
        re.findall(r"^evaluation of version (\d+): return (\S+); the newest is version (\d+)$", out, re.MULTILINE)
        for out in runs
    ]
    for results in found:
        versions = [int(version) for version, _, _ in results]
        assert versions == sorted(set(versions)) and versions[-1] == 7
        assert all(int(version) <= int(newest) for version, _, newest in results)
    once, again, slow = ({version: ret for version, ret, _ in results} for results in found)
    assert all(once[version] == again[version] for version in once.keys() & again.keys())
    assert len(slow) < 7 and float(slow["7"]) > 100


WANDB = """
def init(project, config):
    print("wandb", project, config["nprocs"])
    return __import__("sys").modules[__name__]

def log(row, step):
    print("logged", row, step)

def finish():
    print("finished")
"""


@pytest.mark.tensorboard
@pytest.mark.parametrize("n", [1, 2])
def test_trackers_are_on_rank_0_alone(tmp_path, n):
    (tmp_path / "wandb.py").write_text(WANDB)
    folder, command = tmp_path / "events", [sys.executable, EXAMPLES / "trackers.py", "--nprocs", n, "--iterations", 3]
    done = run([*command, "--tensorboard", folder, "--wandb", "mine"], 100, {"PYTHONPATH": f"{ROOT}:{tmp_path}"})
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == f"wandb mine {n}" and lines[-1] == "finished" and len(lines) == 2 + 2 * 3
    assert [line.split()[-1] for line in lines if "logged" in line] == ["20", "40", "60"]
    assert len(list(folder.iterdir())) == 1
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    reader = events.EventAccumulator(str(folder))
    reader.Reload()
    returns = [float(line.split()[-1]) for line in lines if "return" in line and "iteration" in line]
    assert [event.value for event in reader.Scalars("return")] == pytest.approx(returns, abs=0.06)
    assert [event.step for event in reader.Scalars("return")] == [20, 40, 60]


def test_every_program_is_tried_and_in_the_readme():
    shared = {"core", "core_tf1", "core_torch", "two_branch", "hook"}  # tests/trainer/ trains with the last two
    programs = {path.stem for path in EXAMPLES.glob("*.py")} - shared - SIMULATORS
    programs -= {"sb3_ppo", "async_evaluator", "trackers"}
    adopted = {f"adopt_{name}" for name in SPINNING_UP} | {"adopt_2017", "adopt_test_policy"}
    assert programs == adopted | set(TEACHING)
    readme = (EXAMPLES / "README.md").read_text()
    assert all(f"`{program}.py`" in readme for program in programs | SIMULATORS)


def test_the_table_is_the_one_that_the_benchmark_prints():
    done = run([sys.executable, "-m", "benchmarks.examples", "--table"], 60)
    readme = (EXAMPLES / "README.md").read_text()
    rows = done.out.splitlines()[2:]
    assert len(rows) >= len(TEACHING) and all(row.rsplit("|", 3)[0] in readme for row in rows)  # but for the figures
