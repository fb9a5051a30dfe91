"""The number of cores changes the time of a run, not its bits: affinity, quota, a launcher's binding, resuming."""

import os
import sys

import pytest
from conftest import LAUNCHER, mpi_environment, run

CORES = sorted(os.sched_getaffinity(0))
ON_ONE = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); os.execv(sys.argv[2], sys.argv[2:])"
TASKSET = [sys.executable, "-c", ON_ONE, CORES[0]]
BOUND = {
    "mpich": ["-bind-to", "core", "-n", 2],
    "openmpi": ["--allow-run-as-root", "--bind-to", "core", "-n", 1],  # rank 0 has one core, and no others to share
}
WIDE = ["--batch_steps", 1200, "--num_envs", 4, "--minibatches", 1, "--policy_hid_list", "256,256"]
NARROW = ["--batch_steps", 1200, "--num_envs", 4, "--minibatches", 1]


def train(folder, *arguments, before=(), env=None):
    """The weights and the checkpoint's arrays of a run, and what it printed."""
    command = [*before, sys.executable, "train.py", *arguments, "--run_dir", folder]
    done = run(command, 120, env)
    assert done.status == 0, done.err
    return (folder / "policy.safetensors").read_bytes(), done.err


def options(framework, algo, sizes):
    if algo != "trpo" and sizes is WIDE:
        sizes = [*sizes, "--epochs", 2]
    return ["Hopper-v4", "--total_steps", 2400, "--framework", framework, "--algo", algo, *sizes]


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.slow_unless(framework="numpy", algo="ppo")
@pytest.mark.parametrize(
    ("framework", "sizes", "algo"),
    [
        pytest.param("numpy", WIDE, "ppo", id="numpy-wide-ppo"),
        pytest.param("numpy", NARROW, "trpo", id="numpy-narrow-trpo"),
        pytest.param("torch", WIDE, "ppo", id="torch-ppo", marks=pytest.mark.torch),
        pytest.param("tf", WIDE, "ppo-kl", id="tf-ppo-kl", marks=pytest.mark.tensorflow),
    ],
)
def test_one_core_or_two(tmp_path, framework, algo, sizes):
    arguments = options(framework, algo, sizes)
    expected, _ = train(tmp_path / "two", *arguments)
    found, said = train(tmp_path / "one", *arguments, "--nprocs", 2, before=TASKSET)
    assert found == expected and said.count("2 threads on 1 core: the same bits") == 1


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_a_launcher_may_bind_rank_0_to_one_core(tmp_path, mpi):
    arguments = options("numpy", "ppo", WIDE)
    expected, _ = train(tmp_path / "free", *arguments)
    launcher = [LAUNCHER[mpi], *BOUND[mpi]]
    assert train(tmp_path / "bound", *arguments, before=launcher, env=mpi_environment(mpi))[0] == expected


@pytest.mark.slow
def test_resume_keeps_the_number_of_threads(tmp_path):
    arguments = ["Hopper-v4", *WIDE[4:], "--epochs", 2, "-b", 60, "-n"]
    expected, _ = train(tmp_path / "whole", *arguments, 120)
    assert train(tmp_path / "one", *arguments, 120, "--threads", 1)[0] != expected
    train(tmp_path / "half", *arguments, 60)
    resume = [sys.executable, "train.py", "--resume", tmp_path / "half", "-n"]
    done = run([*TASKSET, *resume, 120], 120)
    assert done.status == 0 and (tmp_path / "half" / "policy.safetensors").read_bytes() == expected
    refused = run([*resume, 180, "--threads", 1], 60)
    assert refused.status == 2 and "--threads cannot change on --resume" in refused.err
