"""Threads in a program of the user: one for each rank, all cores for rank 0 between a gather and the next call."""

import functools
import json
import sys

import pytest
from conftest import FLAGS, LAUNCHER, RANKS, mpi_environment, run

import mpi_util
from mpi_util.errors import UsageError
from mpi_util.host.cores import update_threads, usable_cores
from mpi_util.ranks import threads

CORES = usable_cores()
PROGRAM = RANKS / "threads.py"


def watch(n, mode, mpi="mpich", env=None, launcher=()):
    """({(rank, part): [what was found]}, checksum of the products made on rank 0)."""
    done = run([*launcher, sys.executable, PROGRAM, n, mode], 120, {**mpi_environment(mpi), **(env or {})})
    assert done.status == 0, done.err
    found = {}
    for row in map(json.loads, (line for line in done.out.splitlines() if line.startswith("{"))):
        found.setdefault((row["rank"], row["part"]), []).append(row)
    assert len(found[0, "collect"]) == len(found[0, "update"]) == 2
    return found, done.out.rpartition("checksum ")[2]


def require(found, collecting=1, updating=CORES):
    for (_, part), rows in found.items():
        wanted = collecting if part == "collect" else updating
        for row in rows:
            assert row.get("threads", wanted) == wanted, row
            for library in ("numpy", "torch"):
                used = row.get(library, wanted)
                assert used < 1.2 if wanted == 1 else used > 1.2, row


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["after", "before", "late"])
@pytest.mark.skipif(CORES == 1, reason="needs two cores")
def test_rank_0_updates_with_all_cores_and_collects_with_one(mode):
    alone, product = watch(1, mode)
    require(alone)
    found, same = watch(2, mode)
    require(found)
    assert set(found) == {(0, "collect"), (0, "update"), (1, "collect")} and same == product


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.skipif(CORES == 1, reason="needs two cores")
def test_a_launcher_may_have_started_and_bound_the_ranks(mpi):
    command = [LAUNCHER[mpi], *FLAGS[mpi], "-n", 2]
    require(watch(2, "after", mpi, launcher=command)[0])


@pytest.mark.tensorflow
@pytest.mark.skipif(CORES == 1, reason="needs two cores")
@pytest.mark.parametrize("mpi", ["openmpi"])  # by which the launcher binds each rank to a core
def test_tensorflow_has_as_many_threads_on_each_rank(mpi):
    """Its pools keep their size, and the last bits of a wide layer depend on it."""
    found, same = watch(2, "tensorflow", mpi, launcher=[LAUNCHER[mpi], *FLAGS[mpi], "-n", 2])
    rows = [row for part in found.values() for row in part]
    assert all(row["tensorflow"] > 1.2 for row in rows) and len({row["row"] for row in rows}) == 1, rows
    assert watch(1, "tensorflow", mpi)[1] == same


@pytest.mark.slow
@pytest.mark.torch
def test_what_the_user_has_set_stays():
    require(watch(2, "after", env={"OMP_NUM_THREADS": "1"})[0], updating=1)


@pytest.mark.torch
@pytest.mark.slow
def test_other_ways_to_set_the_threads():
    require(watch(2, "after", env={"MPI_UTIL_CORES": "1"})[0], updating=1)
    for (_, part), rows in watch(2, "after-set")[0].items():
        assert all(row["threads"] == 1 and (row["numpy"] > 1.2) == (part == "update" and CORES > 1) for row in rows)


AFTER_EACH_CALL = """
import sys, mpi_util
if mpi_util.mpi_fork(int(sys.argv[1])) == "parent":
    sys.exit()
import numpy as np, torch
from mpi_util_spinup import mpi_pytorch, mpi_tools
net, ones = torch.nn.Linear(256, 256), np.ones(3, np.float32)
calls = [lambda f=f, x=x: f(x) for f in (mpi_util.all_sum, mpi_util.all_mean, mpi_util.bcast) for x in (1.0, ones)]
calls += [lambda f=f: f(net) for f in (mpi_util.rank0_bcast_wts, mpi_util.all_avg_wts, mpi_pytorch.sync_params)]
calls += [lambda f=f: f(ones) for f in (mpi_tools.mpi_avg, mpi_tools.mpi_sum, mpi_tools.mpi_statistics_scalar)]
calls += [lambda: (net(torch.ones(1, 256)).sum().backward(), mpi_pytorch.mpi_avg_grads(net))]
calls += [lambda: mpi_util.share(3), lambda: list(mpi_util.deal(3)), lambda: mpi_util.all_accum_batches([1])]
for call in calls:
    mpi_util.rank0_gather(0)
    before = torch.get_num_threads()
    call()
    mpi_util.print0(before, torch.get_num_threads())
"""


@pytest.mark.torch
@pytest.mark.skipif(CORES == 1, reason="needs two cores")
@pytest.mark.slow_unless(n=2)
@pytest.mark.parametrize("n", [1, 2])
def test_after_a_call_rank_0_has_as_many_threads_at_any_size(tmp_path, n):
    """Or the update below it would have other bits."""
    (tmp_path / "program.py").write_text(AFTER_EACH_CALL)
    done = run([sys.executable, tmp_path / "program.py", n], 60)
    assert done.out == f"{CORES} 1\n" * 16, done.err


THREADS_OF_UPDATES = """
import sys, numpy as np
SETUP
for size in (256, 16, 255, 16):
    mpi_util.rank0_bcast_wts({"scale": np.ones(2), "w": np.zeros((ROWS, size))})
    mpi_util.print0(torch.get_num_threads(), end=" ")
    mpi_util.rank0_accum_batches({"x": np.zeros(2)})
    mpi_util.print0(torch.get_num_threads())
"""
FORK = "import mpi_util\nif mpi_util.mpi_fork(int(sys.argv[1])) == 'parent': sys.exit()"


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(CORES == 1, reason="needs two cores")
@pytest.mark.left_out(n=1, rows=256)
@pytest.mark.left_out(n=1, threads=3)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("setup", "rows", "threads"),
    [
        (f"import torch\n{FORK}", 255, 1),  # late
        (f"import torch\n{FORK}", 256, CORES),  # and it stays, when smaller ones are sent
        (f"{FORK}\nimport torch", 255, 1),
        (f"import torch\n{FORK.replace('1])', '1]), threads=3')}", 255, 3),
    ],
    ids=["late, small", "late, large", "early, small", "set"],
)
def test_a_small_model_is_updated_with_one_thread(tmp_path, setup, rows, threads, n):
    """Known by its largest array: several threads are slower there, and much slower beside another busy process."""
    (tmp_path / "program.py").write_text(THREADS_OF_UPDATES.replace("SETUP", setup).replace("ROWS", str(rows)))
    done = run([sys.executable, tmp_path / "program.py", n], 60)
    assert done.out == f"1 {threads}\n" * 4, done.err


TEAMS = """
import sys, mpi_util, mpi_util.host.cores as cores
cores.usable_cores = lambda: 8
if mpi_util.mpi_fork(int(sys.argv[1]), threads=eval(sys.argv[2])) == "parent":
    sys.exit()
import torch
from mpi4py import MPI
rank, team, threads = mpi_util.rank, MPI.COMM_WORLD.Split(mpi_util.rank // 3), []
moments = type("Moments", (), {"mean": 0.0, "var": 1.0, "count": 1})
for comm in (team, None):
    for call in ("rank0_gather", "merge_moments", "all_sum"):
        getattr(mpi_util, call)(moments() if call == "merge_moments" else rank, comm=comm)
        threads.append(torch.get_num_threads())
print(rank, *threads)
"""


@pytest.mark.torch
@pytest.mark.slow_unless(n=1)
@pytest.mark.parametrize(("n", "given", "of_team", "of_all"), [(1, None, 8, 8), (4, None, 6, 8), (4, 3, 3, 3)])
def test_on_another_communicator_rank_0_has_the_cores_of_its_ranks(tmp_path, n, given, of_team, of_all):
    """Ranks 0, 1, 2 of 4: a number that does not depend on what the fourth one does meanwhile."""
    (tmp_path / "program.py").write_text(TEAMS)
    done = run([sys.executable, tmp_path / "program.py", n, given], 60)
    others = [f"{k} 1 1 1 1 1 1" for k in range(1, n)]
    assert sorted(done.out.splitlines()) == [f"0 {of_team} {of_team} 1 {of_all} {of_all} 1", *others], done.err


@pytest.mark.slow
@pytest.mark.torch
def test_a_number_that_torch_is_given_between_the_updates_stays(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np, torch, mpi_util\n"
        "mpi_util.mpi_fork(1, threads=3)\n"
        "torch.set_num_threads(1)\n"
        "for _ in range(3):\n"
        "    mpi_util.rank0_accum_batches({'x': np.zeros(2)})\n"
        "    print(before := torch.get_num_threads())\n"
        "    torch.set_num_threads(1)\n"  # as what needs one thread for a while does
        "    torch.set_num_threads(before)\n"
        "    mpi_util.rank0_bcast_wts({'x': np.zeros(2)})\n"
    )
    assert run([sys.executable, program], 60).out == "1\n" * 3


@pytest.mark.slow
@pytest.mark.torch
def test_a_number_that_another_thread_sets_is_its_own(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np, threading, torch, mpi_util\n"
        "mpi_util.mpi_fork(1, threads=3)\n"
        "for _ in range(2):\n"
        "    mpi_util.rank0_accum_batches({'x': np.zeros(2)})\n"
        "    (thread := threading.Thread(target=torch.set_num_threads, args=(1,))).start()\n"
        "    thread.join()\n"
        "    print(torch.get_num_threads())\n"
        "    mpi_util.rank0_bcast_wts({'x': np.zeros(2)})\n"
        "    print(torch.get_num_threads())\n"
    )
    assert run([sys.executable, program], 60).out == "3\n1\n" * 2


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("n", [1, 2])
def test_torch_may_be_imported_during_a_gather(tmp_path, n):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, threading, numpy as np, mpi_util\n"
        f"if mpi_util.mpi_fork({n}) == 'parent': sys.exit()\n"
        "thread = threading.Thread(target=__import__, args=('torch',))\n"
        "if mpi_util.rank == 0: thread.start()\n"
        "while mpi_util.all_sum(int(thread.is_alive())): mpi_util.rank0_accum_batches({'x': np.ones((3, 2))})\n"
        "mpi_util.print0('imported')\n"
    )
    done = run([sys.executable, program], 60)
    assert (done.status, done.out) == (0, "imported\n"), done.err


def test_a_module_of_the_users_may_be_called_torch(tmp_path):
    (tmp_path / "torch.py").write_text("def get_num_threads(): return 1\ndef set_num_threads(n): pass\n")
    (tmp_path / "program.py").write_text("import mpi_util\nmpi_util.mpi_fork(1)\nimport torch\nmpi_util.all_sum(1)\n")
    done = run([sys.executable, tmp_path / "program.py"], 60)
    assert (done.status, done.err) == (0, "")


SETTLED = "import torch; torch.zeros(1).exp_()"
STARTS = {  # of a program that comes to compute with several threads
    "torch before": "import torch, mpi_util; mpi_util.mpi_fork(1)",
    "torch after": "import mpi_util; mpi_util.mpi_fork(1); import torch",
}


@functools.cache
def first_exp(before):
    """What torch's exp gives where MKL, if it looked for the kind of processor only then, would find another one."""
    program = f"import os; {before}; os.environ['MKL_VML_DEBUG_CPU_TYPE'] = '9'\nprint(torch.full((64,), 0.5).exp())"
    done = run([sys.executable, "-c", program], 60)
    assert done.status == 0, done.err
    return done.out


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_mkl_knows_the_processor_before_two_threads_ask(start):
    """It has a race there, in which a thread computes with 4 correct digits."""
    if first_exp("import torch") == first_exp(SETTLED):
        pytest.skip("this torch has no MKL, or one that cannot be told another processor")
    assert first_exp(STARTS[start]) == first_exp(SETTLED)


@pytest.mark.torch
@pytest.mark.slow
def test_a_number_of_threads_that_is_not_that_of_the_cores(tmp_path):
    (tmp_path / "program.py").write_text(
        THREADS_OF_UPDATES.replace("SETUP", FORK + "\nimport torch").replace("ROWS", "256")
    )
    done = run([sys.executable, tmp_path / "program.py", 2], 60, {"MPI_UTIL_UPDATE_THREADS": "3"})
    assert done.out == "1 3\n" * 4, done.err


def test_variables_of_ranks():
    ours = threads.environment({})
    assert ours["OMP_NUM_THREADS"] == ours["OPENBLAS_NUM_THREADS"] == "1"
    assert threads.environment(ours) == ours  # a rank's own job: they are still ours
    followed = threads.environment({"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "active"})
    assert followed == {"MPI_UTIL_THREADS": ""}  # the other libraries follow it
    assert ours["GOMP_SPINCOUNT"] == "10000" and threads.environment({"GOMP_SPINCOUNT": "7"})["GOMP_SPINCOUNT"] == "7"
    users = threads.environment({"OPENBLAS_NUM_THREADS": "3"})
    assert "OPENBLAS_NUM_THREADS" not in users and users["OMP_NUM_THREADS"] == "1"


def test_numbers_that_are_none(monkeypatch):
    with pytest.raises(UsageError, match="threads is a whole number of at least 1; got 0"):
        mpi_util.mpi_fork(1, threads=0)
    monkeypatch.setenv("MPI_UTIL_UPDATE_THREADS", "0")
    with pytest.raises(UsageError, match="MPI_UTIL_UPDATE_THREADS is the number of threads"):
        update_threads()
    for value in ("many", "0", "-1", "2.5", "inf"):
        monkeypatch.setenv("MPI_UTIL_CORES", value)
        with pytest.raises(UsageError, match=r"MPI_UTIL_CORES is the number of cores .* at least 1; got"):
            usable_cores()


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    ("n", "env", "threads"),
    [(1, {}, CORES), (2, {}, max(1, CORES // 2)), (1, {"OMP_NUM_THREADS": "1"}, 1), (1, {"MPI_UTIL_CORES": "1"}, 1)],
)
def test_a_fair_share_for_programs_that_average(tmp_path, n, env, threads):
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np, torch, mpi_util\n"
        "from mpi_util_spinup.mpi_pytorch import setup_pytorch_for_mpi\n"
        "from mpi_util_spinup.mpi_tools import mpi_fork\n"
        f"mpi_fork({n})\n"
        "setup_pytorch_for_mpi()\n"
        "mpi_util.rank0_accum_batches({'x': np.zeros(2)})\n"
        "print('threads', torch.get_num_threads())\n"
    )
    assert run([sys.executable, program], 60, env).out == f"threads {threads}\n" * n
