"""The channel of ranks on several machines: what fails amid a call."""

import sys

import pytest
from conftest import run


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"], indirect=True)
@pytest.mark.parametrize("what", ["gather", "broadcast"])
def test_what_fails_amid_a_call_between_machines_is_everybodys(run_ranks, what):
    done = run_ranks("amid.py", 4, what, timeout=60, env={"MPI_UTIL_MACHINES": "2"})
    assert done.out == "done\n" * 4 and not done.err


OVERFLOW = """
import sys, mpi_util
if mpi_util.mpi_fork(2) == "parent":
    sys.exit()
import numpy as np
array = np.ones(200_000)
array[-1] = 1.5e308
for _ in range(2):
    try:
        with np.errstate(over="raise"):
            mpi_util.all_sum(array)
    except (FloatingPointError, mpi_util.MpiUtilError) as error:
        print(f"{mpi_util.rank} {error}\\n", end="")
"""


def test_a_rank_that_fails_amid_a_sum_between_machines_leaves_no_other_waiting(tmp_path):
    (tmp_path / "program.py").write_text(OVERFLOW)
    done = run([sys.executable, tmp_path / "program.py"], 60, {"MPI_UTIL_MACHINES": "2"})
    assert "0 all_sum of an array: rank 1 failed with FloatingPointError: overflow" in done.out, done.err
    again = "all_sum of an array: a call between machines was interrupted; the program must be started again"
    assert {f"0 {again}", f"1 {again}"} <= set(done.out.splitlines())
