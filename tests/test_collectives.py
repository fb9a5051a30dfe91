"""The collective calls, each on 1 to 4 ranks, three communicators, both MPIs, and with ranks that share no memory."""

import pytest


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("program", ["gather.py", "weights.py", "averaging.py", "torch_grads.py"])
def test_collectives(run_ranks, program, n):
    assert "checks on" in run_ranks(program, n).out


@pytest.mark.parametrize("machines", [2, 4])
@pytest.mark.parametrize("program", ["gather.py", "weights.py", "averaging.py", "torch_grads.py"])
def test_ranks_on_several_machines(run_ranks, program, machines):
    assert "checks on" in run_ranks(program, 4, env={"MPI_UTIL_MACHINES": str(machines)}).out
