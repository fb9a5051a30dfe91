"""The collective calls, each on 1 to 4 ranks, three communicators, both MPIs, and with ranks that share no memory."""

import pytest

PROGRAMS = 5  # that ranks/collectives.py runs


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_collectives(run_ranks, n):
    assert run_ranks("collectives.py", n, timeout=200).out.count("checks on") == PROGRAMS


@pytest.mark.parametrize(("mpi", "machines"), [("mpich", 4), ("openmpi", 2)], indirect=["mpi"])
def test_ranks_on_several_machines(run_ranks, machines):
    done = run_ranks("collectives.py", 4, timeout=200, env={"MPI_UTIL_MACHINES": str(machines)})
    assert done.out.count("checks on") == PROGRAMS
