"""JAX: weights of trees and modules, gathered arrays, threads."""

import shutil
import sys

import pytest
from conftest import run

from mpi_util.host.cores import usable_cores

CORES = usable_cores()


@pytest.mark.jax
@pytest.mark.parametrize(("mpi", "n"), [("mpich", 1), ("mpich", 3), ("openmpi", 2)], indirect=["mpi"])
def test_jax(run_ranks, n):
    assert "checks on" in run_ranks("jax_all.py", n, timeout=240).out


@pytest.mark.jax
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no GPU")
@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
@pytest.mark.parametrize(("n", "where"), [(1, "rank 0"), (3, "rank 0"), (2, "everywhere")])
def test_jax_on_a_gpu(run_ranks, n, where):
    assert "4 checks on" in run_ranks("jax_gpu.py", n, where, timeout=240).out


@pytest.mark.jax
@pytest.mark.keras
@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
def test_keras_on_jax(run_ranks):
    assert run_ranks("keras_jax.py", 2, timeout=240, env={"KERAS_BACKEND": "jax"}).out == "done\n"


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
    on_cpu = {"JAX_PLATFORMS": "cpu"}
    two, one = (run([sys.executable, tmp_path / "program.py", n], 120, on_cpu).out for n in (2, 1))
    assert two == one and two.startswith(f"({CORES}, ")
    user = run([sys.executable, tmp_path / "program.py", 1], 120, on_cpu | {"NPROC": "1"}).out
    assert user.startswith("(1, ") and user[4:] != one[4:]


@pytest.mark.parametrize(
    ("n", "call", "env", "expected"),
    [
        (2, "2", {}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
        (1, "1", {}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
        (2, "2, gpu_pct=0.2", {}, {"XLA_CLIENT_MEM_FRACTION": "0.2"}),
        (2, "2, gpu_pct=0.2", {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".3"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".3"}),
    ],
)
def test_no_rank_takes_most_of_a_gpu_unless_the_user_says_so(tmp_path, n, call, env, expected):
    (tmp_path / "program.py").write_text(
        f"import os, mpi_util\nmpi_util.mpi_fork({call}, exit=True)\n"
        "mpi_util.msg({name: value for name, value in os.environ.items() if 'XLA' in name})"
    )
    done = run([sys.executable, tmp_path / "program.py"], 60, env)
    assert sorted(done.out.splitlines()) == [f"[rank {k}] {expected}" for k in range(n)], done.err


IN_JIT = """
import sys
import mpi_util
mpi_util.mpi_fork(2, exit=True)
import jax, jax.numpy as jnp
jax.jit(lambda x: mpi_util.all_mean(x))(jnp.ones(2))
"""


@pytest.mark.jax
def test_a_collective_call_within_jit_is_one_line(tmp_path):
    (tmp_path / "program.py").write_text(IN_JIT)
    done = run([sys.executable, tmp_path / "program.py"], 120)
    first, *others = done.err.splitlines()
    assert done.status == 1 and "call this outside of jax.jit" in first and len(others) <= 1, done.err
