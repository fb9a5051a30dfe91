"""Stable-Baselines3's on-policy algorithms on N ranks."""

import re
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, run

pytestmark = pytest.mark.sb3
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # for small networks on a busy machine several are slow


@pytest.mark.parametrize(("n", "mpi"), [(1, "mpich"), (2, "openmpi"), (3, "mpich")], indirect=["mpi"])
def test_on_n_ranks(run_ranks, n, tmp_path):
    finished = run_ranks("sb3.py", n, tmp_path, env=ONE_THREAD if n < 3 else {}, timeout=200)
    assert "check_output done" in finished.out
    for line in ("Using cpu device", "Wrapping the env in a DummyVecEnv"):
        assert finished.out.count(line) == 1
    assert re.findall(r"total_timesteps +\| (\d+)", finished.out) == ["31", "62"]
    assert "is of size `n_steps * n_envs = 31`" in finished.err


@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
def test_a_rank_fails(run_ranks, tmp_path):
    crash = run_ranks("sb3.py", 2, tmp_path, "crash", status=1, env=ONE_THREAD)
    assert "rank 1 (phase rollout): uncaught exception" in crash.err and "the simulator is broken" in crash.err
    assert run_ranks("sb3.py", 2, tmp_path, "interrupt", status=130, env=ONE_THREAD).err.count("Ctrl-C") == 1


@pytest.mark.parametrize("n", [1, 3])
def test_example(n, tmp_path):
    settings = ("--env", "CartPole-v1", "--steps", 128, "--total", 256, "--save", tmp_path / "model")
    finished = run([sys.executable, ROOT / "examples" / "sb3_ppo.py", "--nprocs", n, *settings], 150, ONE_THREAD)
    assert finished.status == 0, f"{finished.out}\n{finished.err}"
    assert finished.out.count("return after 256 steps: ") == 1 and (tmp_path / "model.zip").exists()


def test_environments_that_hold_each_other_are_looked_through_once():
    from mpi_util_sb3 import _check_monitors

    outer, inner = SimpleNamespace(results_writer="own"), SimpleNamespace()
    outer.env, inner.env = inner, outer
    _check_monitors(SimpleNamespace(envs=[outer, inner]))
