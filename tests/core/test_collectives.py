"""The collective calls, each on 1 to 4 ranks, three communicators, both MPIs, and with ranks that share no memory."""

import importlib.util
import re
import sys

import pytest
from conftest import mpi_environment, run

PROGRAMS = 5 if importlib.util.find_spec("torch") else 2  # that ranks/collectives.py runs


@pytest.mark.slow_unless(n=3)
@pytest.mark.left_out(mpi="openmpi", n=[1, 3, 4])  # on one machine ranks share memory, whatever the MPI
@pytest.mark.left_out(mpi="mpich", n=2)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_collectives(run_ranks, n):
    assert run_ranks("collectives.py", n, timeout=280).out.count("checks on") == PROGRAMS


@pytest.mark.slow
@pytest.mark.parametrize(("mpi", "machines"), [("mpich", 4), ("openmpi", 2)], indirect=["mpi"])
def test_ranks_on_several_machines(run_ranks, machines):
    done = run_ranks("collectives.py", 4, timeout=280, env={"MPI_UTIL_MACHINES": str(machines)})
    assert done.out.count("checks on") == PROGRAMS


@pytest.mark.parametrize(
    ("mpi", "who", "machines"),
    [("mpich", 1, 1), ("openmpi", 2, 1), ("mpich", 1, 3), ("openmpi", 2, 3), ("openmpi", 5, 3)],
    indirect=["mpi"],
)
def test_agreements(run_ranks, who, machines):
    done = run_ranks("agree.py", 6, who, timeout=60, status=1, env={"MPI_UTIL_MACHINES": str(machines)})
    assert done.out == "passed\n"
    assert f"RankLeftError: all_sum: rank {who} has ended while rank 0 waits for it" in done.err
    assert len(done.err.splitlines()) == 2, done.err


def test_an_answer_may_come_after_rank_0_has_ended(run_ranks):
    done = run_ranks("slow_leader.py", 4, env={"MPI_UTIL_MACHINES": "2"})
    assert done.out == "done\n" * 4 and not done.err


FREED = """
import sys, numpy as np, mpi_util
mpi_util.mpi_fork(3, exit=True)
from mpi4py import MPI
calls = (
    lambda comm: [*mpi_util.deal(5, comm=comm)],
    lambda comm: mpi_util.all_sum(np.ones(200_000), comm=comm),
    lambda comm: mpi_util.rank0_bcast_wts({"w": np.ones(100_000)}, comm=comm),
)
for i in range(15):
    comm = MPI.COMM_WORLD.Dup()
    calls[i % 3](comm)
    comm.Free()
print("freed", flush=True)
"""


@pytest.mark.parametrize("machines", [1, 2])
def test_a_communicator_may_be_freed_at_once(tmp_path, mpi, machines):
    """A rank that frees it waits for those that have yet to map what it shares."""
    (tmp_path / "program.py").write_text(FREED)
    environment = mpi_environment(mpi) | {"MPI_UTIL_MACHINES": str(machines)}
    done = run([sys.executable, tmp_path / "program.py"], 60, environment)
    assert done.status == 0 and done.out == "freed\n" * 3, done.err


ALIGNMENTS = """
import sys, numpy as np, mpi_util
if mpi_util.mpi_fork(3) == "parent":
    sys.exit()
policy = {"w": np.zeros((5, 3))}
if sys.argv[1] == "torch":
    import torch
    net = policy["net"] = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 3))
for i in range(5):
    mpi_util.rank0_bcast_wts(policy)
    if mpi_util.rank == 0:
        if i > 2:
            print("now", file=sys.stderr, flush=True)
        policy["w"] = policy["w"] + 1.0
        if sys.argv[1] == "torch":
            net.load_state_dict(net.state_dict())
            theta = torch.nn.utils.parameters_to_vector(net.parameters())
            if i > 2:
                torch.nn.utils.vector_to_parameters(theta.detach(), net.parameters())
        elif i > 2:
            policy["w"] = np.asfortranarray(policy["w"])
mpi_util.rank0_bcast_wts(policy)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", [("numpy", "w"), pytest.param("torch", "net/0.bias", marks=pytest.mark.torch)])
def test_an_array_that_lies_otherwise_on_rank_0_is_named_once(tmp_path, kind, name):
    (tmp_path / "program.py").write_text(ALIGNMENTS)
    done = run([sys.executable, tmp_path / "program.py", kind], 60)
    assert done.status == 0 and done.err.count("mpi_util: ") == 1, done.err
    assert re.match(rf"now\n.*mpi_util: '{name}' has another layout or alignment", done.err, re.DOTALL)


CALLS = """
import sys, time
from pathlib import Path
import numpy as np, mpi_util
if mpi_util.mpi_fork(2) == "parent":
    sys.exit()
FOLDER = str(Path(mpi_util.__file__).parent)
shapes = {"observes": (376,), "actions": (17,), "advantages": (), "disc_sum_rew": ()}
batch = {key: np.ones((60, *shape), np.float32) for key, shape in shapes.items()}


def count():
    modules, calls = set(), 0

    def see(frame, event, argument):
        nonlocal calls
        here, caller = frame.f_code.co_filename, frame.f_back.f_code.co_filename
        if event == "call" and here.startswith(FOLDER):
            modules.add(here)
            calls += caller.startswith(FOLDER) and caller != here

    mpi_util.all_sum(0)
    time.sleep(0.02 * (mpi_util.rank == int(sys.argv[1])))  # the others are there
    sys.setprofile(see)
    mpi_util.rank0_accum_batches(batch)
    sys.setprofile(None)
    return len(modules), calls


found = [count() for _ in range(40)]
if mpi_util.rank == int(sys.argv[1]):
    print(*map(min, zip(*found)))
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_structure_of_calls(tmp_path, rank):
    """In steady state a gather on one machine passes few modules, with few calls between them; waiting aside."""
    (tmp_path / "program.py").write_text(CALLS)
    done = run([sys.executable, tmp_path / "program.py", rank], 60)
    modules, calls = map(int, done.out.split())
    assert modules <= 10 and calls <= 50, done.out


WITHOUT_CLUSTER = """
import sys
sys.modules["mpi_util.cluster.channel"] = None  # as if the folder were not there
import mpi_util
if mpi_util.mpi_fork(3) == "parent":
    sys.exit()
print(mpi_util.all_sum(1))
"""


@pytest.mark.parametrize("machines", [1, 2])
def test_one_machine_needs_no_cluster_and_several_say_so(tmp_path, mpi, machines):
    (tmp_path / "program.py").write_text(WITHOUT_CLUSTER)
    environment = mpi_environment(mpi) | {"MPI_UTIL_MACHINES": str(machines)}
    done = run([sys.executable, tmp_path / "program.py"], 60, environment)
    if machines == 1:
        assert done.status == 0 and done.out == "3\n" * 3, done.err
    else:
        assert done.status == 1, done.err
        assert done.err.count("mpi_util/cluster/, which is needed for that, is missing") == 1, done.err


HALF = """
import sys, mpi_util
if mpi_util.mpi_fork(2) == "parent":
    sys.exit()
import numpy as np
def total(value, last, over):
    array = np.full(200_000, value)
    array[-1] = last
    try:
        with np.errstate(over=over):
            return mpi_util.all_sum(array)[[0, -1]].tolist()
    except (FloatingPointError, mpi_util.MpiUtilError) as error:
        return type(error).__name__
found = [total(1.0, 1.0, "raise"), total(1.0, 1.5e308, "raise"), total(3.0, 3.0, "raise"), total(4.0, 4.0, "raise")]
print(mpi_util.rank, found)
"""


@pytest.mark.parametrize("machines", [1, 2])
def test_a_rank_that_fails_amid_a_large_sum_makes_no_later_one_wrong(tmp_path, mpi, machines):
    """Only the rank that adds up sees the overflow."""
    (tmp_path / "program.py").write_text(HALF)
    env = mpi_environment(mpi) | {"MPI_UTIL_MACHINES": str(machines)}
    done = run([sys.executable, tmp_path / "program.py"], 60, env=env)
    names = ("FloatingPointError", "MpiUtilError")
    found = [f"{k} [[2.0, 2.0], '{name}', [6.0, 6.0], [8.0, 8.0]]" for k, name in enumerate(names)]
    assert sorted(done.out.splitlines()) == found, done.err
