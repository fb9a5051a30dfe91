"""train.py --eval_async: evaluations beside training change no bit of it, name their iteration, and lose nothing."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, mpi_environment
from training import rows, train, wait_for_row

from mpi_util.host import reap
from trainer.command_line import parse
from trainer.run_folder import CHECKPOINT, checkpoints, load

RUN = ["tests.envs:Uneven-v0", "--total_steps", 6000, "--batch_steps", 200, "--num_envs", 4, "--eval_every", 400]
RUN += ["--eval_episodes", 30, "--lr_schedule", "constant"]  # the same bits whenever it ends
LATE = re.compile(r"evaluation of iteration (\d+): return (-?[\d.]+)$", re.MULTILINE)


def training(folder) -> list[dict[str, str]]:
    """The rows, without what was evaluated."""
    return [{k: v for k, v in row.items() if "Test" not in k} for row in rows(folder)]


def evaluated(folder, column: str = "TestIteration") -> dict[int, dict[str, str]]:
    """What was evaluated, by the iteration it belongs to; each is in a row of that iteration or of a later one."""
    found = {}
    for row in rows(folder):
        if row["AverageTestEpRet"] != "nan":
            iteration = int(row[column])
            assert max(found, default=0) < iteration <= int(row["Iteration"])
            found[iteration] = {k: v for k, v in row.items() if "TestEp" in k}
    return found


@pytest.fixture(scope="module")
def waiting(tmp_path_factory):
    """Folders of runs that wait for their evaluations, with all checkpoints; each made once."""
    made = {}

    def of(*how):
        if how not in made:
            made[how] = tmp_path_factory.mktemp("waiting") / "run"
            train(*RUN, *how, "--save_every", 0, "--keep", 99, "--run_dir", made[how])
        return made[how]

    return of


def check(folder, expected, out: str) -> set[int]:
    """The run in `folder` has the expected bits, and its results are those of their iterations. Returns: these."""
    assert (folder / "policy.safetensors").read_bytes() == (expected / "policy.safetensors").read_bytes()
    assert training(folder) == training(expected)
    right, found = evaluated(expected, "Iteration"), evaluated(folder)
    assert found.items() <= right.items() and max(found) == max(right)  # the last one is waited for
    returns = {i: float(row["AverageTestEpRet"]) for i, row in right.items()}
    late = {int(i): float(ret) for i, ret in LATE.findall(out)}
    assert all(abs(returns[i] - ret) < 0.051 for i, ret in late.items())
    arrays, notes = load(folder / "best.safetensors")
    best = max(found.keys() | late.keys(), key=lambda i: (returns[i], -i))
    assert notes["test_ret"] == returns[best]
    then = next(saved for saved, _ in map(load, checkpoints(expected)) if saved["iteration"] == best)
    assert all(np.array_equal(array, then[name]) for name, array in arrays.items())
    return found.keys() | late.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mpi, n, how",
    [("mpich", 1, ()), ("mpich", 3, ("--overlap",)), ("openmpi", 3, ("--parallel", "average"))],
    indirect=["mpi"],
)
def test_training_is_the_same_and_results_name_iterations(tmp_path, waiting, mpi, n, how):
    if "average" in how:
        how += ("--nprocs", n)  # whose bits depend on it
    out = train(*RUN, *how, "--nprocs", n, "--eval_async", "--run_dir", tmp_path / "run", mpi=mpi).out
    check(tmp_path / "run", waiting(*how), out)
    assert not any(name.startswith("asked/") for name in load(tmp_path / "run" / CHECKPOINT)[0])


def evaluators(process: subprocess.Popen) -> list[int]:
    """Of this run, and of no other one."""
    parents = {int(pid): reap.stat_field(int(pid), reap.STAT_PARENT) for pid in os.listdir("/proc") if pid.isdecimal()}
    family = {process.pid}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family if reap.is_alive(pid)}
    return [pid for pid, line in lines.items() if b"spawn_main" in line]


def ends(pid: int) -> bool:
    """True if the process ends within seconds."""
    return any(not reap.is_alive(pid) or time.sleep(0.05) for _ in range(100))


@pytest.fixture
def started(tmp_path):
    """started(...): train.py --eval_async; it has printed the row of iteration 4, and evaluates for a while."""
    processes = []

    def start(*arguments, mpi: str = "mpich") -> subprocess.Popen:
        command = [sys.executable, "train.py", *RUN, "--eval_episodes", 600, "--eval_async"]
        command += ["--run_dir", tmp_path / "run", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = {**os.environ, **mpi_environment(mpi)}
        processes.append(subprocess.Popen(list(map(str, command)), cwd=ROOT, env=environment, **pipes))
        wait_for_row(processes[-1], 4)
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("mpi, n", [("mpich", 1), ("openmpi", 2)], indirect=["mpi"])
def test_an_evaluator_that_is_killed_ends_the_run_which_can_be_resumed(tmp_path, started, mpi, n):
    process = started("--nprocs", n, "--total_steps", 3000, "--save_every", 0, mpi=mpi)
    (evaluator,) = evaluators(process)
    os.kill(evaluator, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    first, *others = err.splitlines()
    assert process.returncode == 1 and len(others) == (n > 1), err
    assert first == "train.py: the process that evaluates was killed by SIGKILL; --resume evaluates that policy again"
    train("--resume", tmp_path / "run", mpi=mpi)
    assert max(evaluated(tmp_path / "run")) == 15 and ends(evaluator)


@pytest.mark.slow
@pytest.mark.parametrize("signum, status", [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_what_was_under_evaluation_is_evaluated_on_resume(tmp_path, started, waiting, signum, status):
    process = started("--nprocs", 2, "--save_every", 0)
    (evaluator,) = evaluators(process)
    process.send_signal(signum)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (status, "") and ends(evaluator)
    folder = tmp_path / "run"
    arrays, _ = load(folder / CHECKPOINT)
    iteration = int(arrays["asked/iteration"][0])
    before = evaluated(folder).keys()
    assert iteration not in before
    out += train("--resume", folder, "--total_steps", 200 * int(arrays["iteration"][0])).out  # nothing more to learn
    assert LATE.findall(out)[-1][0] == str(iteration) and evaluated(folder).keys() == before
    assert load(folder / "best.safetensors")[1]["test_ret"] >= float(LATE.findall(out)[-1][1]) - 0.051
    train("--resume", folder, "--total_steps", RUN[2], "--nprocs", 3)
    assert (folder / "policy.safetensors").read_bytes() == (waiting() / "policy.safetensors").read_bytes()
    assert training(folder) == training(waiting())


@pytest.mark.slow
def test_the_option_may_be_given_on_resume(tmp_path, waiting):
    train(*RUN[:2], 2000, *RUN[3:], "--run_dir", tmp_path / "run")
    train("--resume", tmp_path / "run", "--total_steps", RUN[2], "--eval_async")
    assert training(tmp_path / "run") == training(waiting())
    before, after = rows(tmp_path / "run")[:10], rows(tmp_path / "run")[10:]
    assert {row["TestIteration"] for row in before} == {""} and after[-1]["TestIteration"] == "30"


@pytest.mark.parametrize("n", [1, 2])
def test_an_exception_in_an_evaluation_is_one_line(tmp_path, n):
    for place in ("step", "init", "reset"):
        (tmp_path / place).touch()
    how = ["tests.envs:Walk-v0", "--eval_every", 100, "--eval_async", "--nprocs", n, "--run_dir", tmp_path / "run"]
    done = train(*how, env={"FLAKY": str(tmp_path)}, status=1)
    first, *others = done.err.splitlines()
    assert re.fullmatch(r"train.py: evaluation of iteration \d+: RuntimeError: evaluation failed", first)
    assert others == ["mpi_util: rank 0 has ended the job; all 2 ranks were stopped"][: n - 1]


def test_it_needs_evaluations(capsys):
    with pytest.raises(SystemExit):
        parse(["Hopper-v4", "--eval_async"])
    expected = "train.py: --eval_async has no effect without --eval_every; leave it out (see --help)\n"
    assert capsys.readouterr().err == expected
