"""Dealing and sharing in one process: what the collective tests cannot time."""

import struct

import pytest

import mpi_util
from mpi_util.collectives import dealing as module
from mpi_util.errors import UsageError


def as_rank(monkeypatch, rank, size):
    monkeypatch.setenv("PMI_RANK", str(rank))
    monkeypatch.setenv("PMI_SIZE", str(size))


@pytest.mark.parametrize(("n", "size"), [(10, 1), (10, 3), (2, 4), (0, 3), (4000, 7)])
def test_shares_are_blocks_that_differ_by_one_at_most(monkeypatch, n, size):
    shares = []
    for rank in range(size):
        as_rank(monkeypatch, rank, size)
        shares.append(mpi_util.share(n))
    assert [i for part in shares for i in part] == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("n", [-1, 2.0, True, "3", None])
def test_a_share_of_what_is_no_count(n):
    with pytest.raises(UsageError, match="share: n is a number of things"):
        mpi_util.share(n)


def test_seeds_of_ranks_do_not_overlap(monkeypatch):
    seeds = {}
    for rank in range(20):
        as_rank(monkeypatch, rank, 20)
        for seed in range(20):
            seeds[seed, rank] = mpi_util.rank_seed(seed)
    assert len(set(seeds.values())) == len(seeds) and all(0 <= s < 2**31 for s in seeds.values())


def test_a_round_that_is_closed_amid_a_take_stays_closed(monkeypatch):
    dealt = mpi_util.deal(5)

    class ClosedWhileReading:
        size = module._SLOT.size

        @staticmethod
        def unpack_from(*where):
            found = struct.unpack_from("qqqq", *where)
            dealt.close()  # as a signal handler, or rank 0 beside another rank, does
            return found

    monkeypatch.setattr(module, "_SLOT", ClosedWhileReading)
    assert next(iter(dealt)) == 0
    assert dealt.closed and list(dealt) == []
