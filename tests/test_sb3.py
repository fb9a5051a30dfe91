"""Stable-Baselines3's on-policy algorithms on N ranks."""

import re

import pytest

pytest.importorskip("stable_baselines3")
pytest.importorskip("sb3_contrib")


@pytest.mark.parametrize(("n", "mpi"), [(1, "mpich"), (2, "openmpi"), (3, "mpich")], indirect=["mpi"])
def test_on_n_ranks(run_ranks, n, tmp_path):
    finished = run_ranks("sb3.py", n, tmp_path)
    assert "check_output done" in finished.out
    for line in ("Using cpu device", "Wrapping the env in a DummyVecEnv"):
        assert finished.out.count(line) == 1
    assert len(re.findall(r"total_timesteps +\| (\d+)", finished.out)) == 2
    assert finished.err.count("truncated mini-batch of size 15") >= 1
