"""JAX: weights of trees and modules, gathered arrays, threads."""

import sys

import pytest
from conftest import run

from mpi_util.host.cores import usable_cores

CORES = usable_cores()


@pytest.mark.jax
@pytest.mark.parametrize(("mpi", "n"), [("mpich", 1), ("mpich", 2), ("mpich", 3), ("openmpi", 2)], indirect=["mpi"])
def test_jax(run_ranks, n):
    assert "checks on" in run_ranks("jax_all.py", n, timeout=240).out


THREADS = """
import hashlib, os, sys
import mpi_util
if mpi_util.mpi_fork(int(sys.argv[1])) == "parent":
    sys.exit()
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))} if mpi_util.rank else os.sched_getaffinity(0))  # as a binding
import jax, jax.numpy as jnp
x, w = (jax.random.normal(jax.random.key(0), shape) for shape in ((2048, 64), (64, 64)))
gradient = jax.jit(jax.grad(lambda w: jnp.tanh(x @ w).sum()))(w)
pool = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")].count("tf_XLAEigen\\n")
found = mpi_util.rank0_gather((pool, hashlib.sha256(gradient.tobytes()).hexdigest()))
mpi_util.print0(*{*found})
"""


@pytest.mark.jax
@pytest.mark.skipif(CORES == 1, reason="needs two cores")
def test_xla_has_as_many_threads_on_each_rank(tmp_path):
    """Its pool keeps its size, and the last bits of a gradient depend on it."""
    (tmp_path / "program.py").write_text(THREADS)
    two, one = (run([sys.executable, tmp_path / "program.py", n], 120).out for n in (2, 1))
    assert two == one and two.startswith(f"({CORES}, ")
    user = run([sys.executable, tmp_path / "program.py", 1], 120, {"NPROC": "1"}).out
    assert user.startswith("(1, ") and user[4:] != one[4:]
