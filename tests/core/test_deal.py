"""Dealing and sharing in one process: what the collective tests cannot time."""

import concurrent.futures
import itertools
import json
import sys

import numpy as np
import pytest
from conftest import mpi_environment, run

import mpi_util
from mpi_util.collectives import deal as module
from mpi_util.errors import UsageError
from mpi_util.ranks.state import made


@pytest.fixture
def as_rank(monkeypatch):
    def become(rank, size):
        monkeypatch.setenv("PMI_RANK", str(rank))
        monkeypatch.setenv("PMI_SIZE", str(size))
        made.clear()

    yield become
    monkeypatch.undo()
    made.clear()


@pytest.mark.parametrize(("n", "size"), [(10, 1), (10, 3), (2, 4), (0, 3), (4000, 7)])
def test_shares_are_blocks_that_differ_by_one_at_most(as_rank, n, size):
    shares = []
    for rank in range(size):
        as_rank(rank, size)
        shares.append(mpi_util.share(n))
    assert [i for part in shares for i in part] == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("n", [-1, 2.0, True, "3", None])
def test_a_share_of_what_is_no_count(n):
    with pytest.raises(UsageError, match="share: n is a whole number"):
        mpi_util.share(n)


def test_seeds_of_ranks_do_not_overlap(as_rank):
    seeds = {}
    for rank in range(20):
        as_rank(rank, 20)
        for seed in range(20):
            seeds[seed, rank] = mpi_util.rank_seed(seed)
            assert seeds[seed, rank] == mpi_util.seed_of(seed, rank)
    assert len(set(seeds.values())) == len(seeds) and all(0 <= s < 2**31 for s in seeds.values())


@pytest.mark.parametrize("seed", [-1, None, 0.5, "a"])
def test_a_seed_is_a_whole_number(seed):
    assert mpi_util.stream(np.int64(5), 1).entropy == 5
    mpi_util.set_global_seeds(np.int64(5))
    for call in (mpi_util.set_global_seeds, mpi_util.rank_seed, mpi_util.seed_of, mpi_util.stream):
        with pytest.raises(UsageError, match="a seed is a whole number of at least 0"):
            call(seed)


def test_threads_of_a_rank_may_share_a_deal():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        numbers = mpi_util.deal(10_000)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            taken = [i for part in pool.map(list, [numbers] * 4) for i in part]
    finally:
        sys.setswitchinterval(before)
    assert sorted(taken) == sorted(numbers.taken) == list(range(10_000))


def test_a_deal_within_the_loop_of_another_is_refused():
    """With one rank too, where no number is lost."""
    with pytest.raises(UsageError, match="Deal pairs as one range"):
        for _ in mpi_util.deal(2):
            list(mpi_util.deal(2))


def test_a_loop_over_dealt_numbers_may_be_left_in_any_way():
    """Also where an error's traceback, or a variable, keeps its iterator."""
    kept = []
    for _ in range(2):
        with pytest.raises(KeyError) as error:
            [{}.pop(i) for i in mpi_util.deal(3)]
        kept += [error, taken := iter(mpi_util.deal(2))]
        assert list(itertools.islice(taken, 2)) == [0, 1]
        for _ in zip(mpi_util.deal(2), range(1)):
            break
    assert list(mpi_util.deal(2)) == [0, 1]


def test_a_deal_may_be_the_last_call_on_several_machines(tmp_path, mpi):
    """Of all ranks, and of some: rank 0, or the first of them, then answers while it waits for the others' end."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time, mpi_util\nif mpi_util.mpi_fork(4) == 'parent': sys.exit()\n"
        "from mpi4py import MPI\n"
        "some = MPI.COMM_WORLD.Split(mpi_util.rank > 0)\n"
        "for comm in (None, some)[:: 1 if sys.argv[1] == 'some' else -1]:\n"
        "    for i in mpi_util.deal(12, comm=comm):\n"
        "        print(i)\n"
        "        if (comm or MPI.COMM_WORLD).Get_rank(): time.sleep(0.1)\n"
    )
    for last in ("some", "all"):
        environment = mpi_environment(mpi) | {"MPI_UTIL_MACHINES": "4"}
        done = run([sys.executable, program, last], 30, environment)
        assert done.status == 0 and sorted(map(int, done.out.split())) == sorted([*range(12)] * 3), done.err


def test_another_machine_asks_seldom_and_hears_of_the_end(tmp_path, mpi):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time, mpi_util\nif mpi_util.mpi_fork(4) == 'parent': sys.exit()\n"
        "from mpi_util.cluster.channel import ClusterCounter\n"
        "asked, more = [], ClusterCounter._more\n"
        "ClusterCounter._more = lambda at, *dealt: (at.guesses or asked.append(1), more(at, *dealt))[1]\n"
        "mine = []\n"
        "for i in mpi_util.deal(200):\n"
        "    mine.append(i)\n"
        "    time.sleep(0.002)\n"
        "everyones = mpi_util.rank0_gather((mine, len(asked)))\n"
        "dealt = mpi_util.deal(10**6)\n"
        "mpi_util.all_sum(0)\n"
        "n, start = 0, time.perf_counter()\n"
        "for i in dealt:\n"
        "    n += 1\n"
        "    if mpi_util.rank == 0 and n == 50: dealt.close()\n"
        "    while mpi_util.rank and n == 50 and not dealt.closed:\n"
        "        dealt.serve()\n"
        "        assert time.perf_counter() < start + 20\n"
        "mpi_util.all_sum(0)\n"
        "if mpi_util.rank == 0:\n"
        "    assert sorted(sum((each for each, _ in everyones), [])) == [*range(200)]\n"
        "    print([number for _, number in everyones], n)\n"
    )
    done = run([sys.executable, program], 60, mpi_environment(mpi) | {"MPI_UTIL_MACHINES": "2"})
    assert done.status == 0, done.err
    asked = json.loads(done.out[: done.out.index("]") + 1])
    assert asked[:2] == [0, 0] and 3 <= sum(asked[2:]) <= 14, asked


def test_a_round_that_is_closed_amid_a_take_stays_closed(monkeypatch):
    dealt, take_some = mpi_util.deal(5), module.Counter.take_some

    def how_many(_):  # called between reading and writing
        dealt.close()  # as a signal handler, or rank 0 beside another rank, does
        return 1

    monkeypatch.setattr(module.Counter, "take_some", lambda counter, of: take_some(counter, of, how_many))
    assert next(iter(dealt)) == 0
    assert dealt.closed and list(dealt) == []


SHARED = """
import sys, threading, mpi_util
if mpi_util.mpi_fork(4) == "parent":
    sys.exit()
sys.setswitchinterval(1e-6)
for _ in range(30):
    episodes, taken = mpi_util.deal(300), []
    threads = [threading.Thread(target=lambda: taken.extend(episodes)) for _ in range(4)]
    if mpi_util.rank == 0:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        taken += episodes
    found = mpi_util.rank0_gather(taken)
    assert mpi_util.rank or sorted(sum(found, [])) == [*range(300)]
"""


def test_threads_of_rank_0_answer_each_question_of_other_machines_once(tmp_path, mpi):
    (tmp_path / "program.py").write_text(SHARED)
    done = run([sys.executable, tmp_path / "program.py"], 60, mpi_environment(mpi) | {"MPI_UTIL_MACHINES": "4"})
    assert done.status == 0, done.err
