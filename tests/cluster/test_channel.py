"""The channel of ranks on several machines: what fails amid a call."""

import pytest


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"], indirect=True)
@pytest.mark.parametrize("what", ["gather", "broadcast"])
def test_what_fails_amid_a_call_between_machines_is_everybodys(run_ranks, what):
    done = run_ranks("amid.py", 4, what, timeout=60, env={"MPI_UTIL_MACHINES": "2"})
    assert done.out == "done\n" * 4 and not done.err
