"""JAX: weights of trees and modules, gathered arrays, threads."""

import pytest


@pytest.mark.jax
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
def test_jax(run_ranks, n):
    assert "checks on" in run_ranks("jax_all.py", n, timeout=240).out
