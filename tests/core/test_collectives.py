"""The collective calls, each on 1 to 4 ranks, three communicators, both MPIs, and with ranks that share no memory."""

import random
import re
import sys

import pytest
from conftest import run

from mpi_util.collectives import channel, rings

PROGRAMS = 5  # that ranks/collectives.py runs


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_collectives(run_ranks, n):
    assert run_ranks("collectives.py", n, timeout=200).out.count("checks on") == PROGRAMS


@pytest.mark.parametrize(("mpi", "machines"), [("mpich", 4), ("openmpi", 2)], indirect=["mpi"])
def test_ranks_on_several_machines(run_ranks, machines):
    done = run_ranks("collectives.py", 4, timeout=200, env={"MPI_UTIL_MACHINES": str(machines)})
    assert done.out.count("checks on") == PROGRAMS


@pytest.mark.parametrize(("mpi", "who"), [("mpich", 1), ("openmpi", 2), ("openmpi", 5)], indirect=["mpi"])
def test_messages_go_through_the_leaders(run_ranks, who):
    done = run_ranks("tree.py", 6, who, timeout=60, status=1, env={"MPI_UTIL_MACHINES": "3"})
    assert done.out == "passed\n"
    assert f"RankLeftError: all_sum: rank {who} has ended while rank 0 waits for it" in done.err
    assert len(done.err.splitlines()) == 2, done.err


def test_an_answer_may_come_after_rank_0_has_ended(run_ranks):
    done = run_ranks("slow_leader.py", 4, env={"MPI_UTIL_MACHINES": "2"})
    assert done.out == "done\n" * 4 and not done.err


def test_the_tree_reaches_each_rank_once(monkeypatch):
    rng = random.Random(1)
    for fan in (1, 2, 3, 32):
        monkeypatch.setattr(channel, "FAN", fan)
        for n in (2, 3, 10, 100, 300):
            found = {}
            machine = [found.setdefault(rng.randrange(rng.choice((1, n))), k) for k in range(n)]
            trees = [channel.Tree(machine, k) for k in range(n)]
            assert sorted(k for ranks in trees[0].below.values() for k in ranks) == list(range(1, n))
            for k, tree in enumerate(trees):
                assert all(trees[child].above == k and child in ranks for child, ranks in tree.below.items())
                assert not tree.below or machine[k] == k
                for child, ranks in tree.below.items():
                    deeper = [each for there in trees[child].below.values() for each in there]
                    assert sorted([child, *deeper]) == ranks
                leaders = [child for child in tree.below if machine[child] == child]
                assert len(leaders) <= fan


def test_a_ring_keeps_order_and_says_when_it_is_full():
    rng, memory = random.Random(1), memoryview(bytearray(rings.size_of(3)))
    leader, member = rings.Rings(memory, [4, 6, 9], 4, [4, 9]), rings.Rings(memory, [4, 6, 9], 9, [4, 9])
    assert list(leader.ranks) == [9] and list(member.ranks) == [4]
    for writer, reader, to, source in ((leader, member, 9, 4), (member, leader, 4, 9)):
        sent, full = [], 0
        for _ in range(5_000):
            message = rng.randbytes(rng.choice((0, 1, 7, 100, rings.LARGE)))
            if writer.write(to, message):
                sent.append((source, message))
                assert reader.news()
            else:
                full += 1
                assert sum(len(each) + 8 for _, each in sent) + len(message) + 8 > 1 << 16
            if rng.random() < 0.1:
                assert list(reader.take()) == sent and not reader.news()
                sent.clear()
        assert full > 10 and list(reader.take()) == sent and not list(writer.take())


PLACES = """
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


@pytest.mark.parametrize("kind, name", [("numpy", "w"), ("torch", "net/0.bias")])
def test_an_array_that_lies_otherwise_on_rank_0_is_named_once(tmp_path, kind, name):
    (tmp_path / "program.py").write_text(PLACES)
    done = run([sys.executable, tmp_path / "program.py", kind], 60)
    assert done.status == 0 and done.err.count("mpi_util: ") == 1, done.err
    assert re.match(rf"now\n.*mpi_util: '{name}' has another layout or alignment", done.err, re.DOTALL)
