"""Spinning Up's MPI tools against plain NumPy on what all ranks bring together."""

import warnings

import numpy as np
from harness import raises, run_checks

import mpi_util
from mpi_util_spinup import mpi_tools
from mpi_util_spinup.mpi_tools import broadcast, mpi_avg, mpi_moments, mpi_statistics_scalar, mpi_sum

if __name__ == "__main__":
    import sys

    mpi_tools.mpi_fork(int(sys.argv[1]))
warnings.simplefilter("error")


def samples(k, size):
    """A different number on each rank: none on the first of several, mean 1e8, std 1."""
    return np.random.default_rng(k).normal(1e8, 1.0, 0 if k == 0 and size > 1 else 100 * k + 7)


def check_identity(comm, rank, size):
    assert (mpi_tools.proc_id(), mpi_tools.num_procs()) == (mpi_util.rank, mpi_util.nworkers)


def check_scalars_stay_scalars(comm, rank, size):
    for x in (rank + 1, float(rank + 1), np.float32(rank + 1)):
        for got, expected in [
            (mpi_sum(x, comm=comm), sum(range(1, size + 1))),
            (mpi_avg(x, comm=comm), (size + 1) / 2),
        ]:
            assert got == expected and np.isscalar(got)
    assert mpi_sum(np.float32(1), comm=comm).dtype == mpi_avg(np.float32(1), comm=comm).dtype == np.float32
    assert mpi_sum(rank == 0, comm=comm) == 1
    assert mpi_sum([1, 2], comm=comm).tolist() == [size, 2 * size]


def check_broadcast_from_any_root(comm, rank, size):
    for root in range(size):
        for shape in [(), (3,), (500, 4), (0,)]:
            x = np.full(shape, rank, "f4")
            assert broadcast(x, root=root, comm=comm) is None
            assert (x == root).all() and x.dtype == "f4"
    raises(mpi_util.MpiUtilError, "root", lambda: broadcast(np.zeros(1), root=size, comm=comm))
    raises(mpi_util.BatchError, "in place", lambda: broadcast([1.0] if rank == 0 else np.zeros(1), comm=comm))
    if size > 1:
        raises(
            mpi_util.RankMismatchError,
            "rank 0: broadcast(root=0) at",
            lambda: broadcast(np.zeros(1), root=rank % 2, comm=comm),
        )
        raises(mpi_util.RankMismatchError, "dtype", lambda: broadcast(np.zeros(1 + rank), comm=comm))


def check_tensors(comm, rank, size):
    if mpi_util.nworkers > 2:
        return  # loading torch takes each rank seconds
    import torch

    mine, root = torch.full((3,), float(rank)), size - 1
    assert torch.equal(mpi_sum(mine, comm=comm), torch.full((3,), float(sum(range(size)))))
    assert mpi_statistics_scalar(mine, comm=comm)[0] == (size - 1) / 2
    broadcast(mine, root, comm=comm)
    assert torch.equal(mine, torch.full((3,), float(root)))


def check_statistics_of_unequal_samples(comm, rank, size):
    everything = np.concatenate([samples(k, size) for k in range(size)])
    mine = samples(rank, size)
    for x in (mine, mine.reshape(-1, 1), mine.tolist()):
        got = mpi_statistics_scalar(x, with_min_and_max=True, comm=comm)
        assert all(type(value) is np.float32 for value in got)
        assert got[0] == np.float32(everything.mean())
        assert np.allclose(got[1], everything.std(), rtol=1e-7, atol=0)
        assert got[2:] == (np.float32(everything.min()), np.float32(everything.max()))
        assert got[0].item() == float(got[0])
        assert mpi_statistics_scalar(x, comm=comm) == got[:2]
    assert len(set(mpi_util.all_accum_batches([got[1].tobytes().hex()], comm=comm))) == 1  # same bits
    narrow = samples(rank, size).astype("f4")
    assert (narrow - got[0]).dtype == np.float32


def check_statistics_of_nothing_and_of_one(comm, rank, size):
    mean, std, low, high = mpi_statistics_scalar([], with_min_and_max=True, comm=comm)
    assert np.isnan([mean, std]).all() and (low, high) == (np.inf, -np.inf)
    last = rank == size - 1
    assert mpi_statistics_scalar([3] if last else [], True, comm=comm) == (3.0, 0.0, 3.0, 3.0)
    mean, std, low, high = mpi_statistics_scalar([np.inf, 1.0] if last else [2.0], True, comm=comm)
    assert (mean, low, high) == (np.inf, 1.0, np.inf) and np.isnan(std)
    raises(mpi_util.BatchError, "real numbers", lambda: mpi_statistics_scalar(["a"] if last else [1.0], comm=comm))


def check_moments_along_an_axis(comm, rank, size):
    def of(k):  # 2, 0, 2, ... samples along the middle axis
        return 1e6 + np.random.default_rng(k).normal(0.0, 1.0, (2, 2 * (k % 2 == 0), 3)).astype("f4")

    whole = np.concatenate([of(k) for k in range(size)], axis=1)
    for mean, std, count in (mpi_moments(of(rank), 1, comm), mpi_moments(of(rank), -2, keepdims=True, comm=comm)):
        assert count == whole.shape[1] and mean.dtype == std.dtype == np.float32
        assert mean.shape == std.shape in ((2, 3), (2, 1, 3))
        exact = whole.astype(float)
        assert np.array_equal(mean.reshape(2, 3), exact.mean(1).astype("f4"))
        assert np.allclose(std.reshape(2, 3), exact.std(1), rtol=1e-6, atol=0)
    mean, std, count = mpi_moments([rank, rank + 1], comm=comm)  # a scalar as in baselines
    assert mean == size / 2 and mean.dtype == np.float64 and mean.shape == () and count == 2 * size
    assert np.isclose(std, np.concatenate([(k, k + 1) for k in range(size)]).std())
    mean, std, count = mpi_moments(np.zeros((0, 2)), comm=comm)
    assert np.isnan([mean, std]).all() and mean.shape == (2,) and count == 0
    if size > 1:
        raises(mpi_util.RankMismatchError, "shape", lambda: mpi_moments(np.zeros((3, 1 + rank % 2)), comm=comm))


if __name__ == "__main__":
    mpi_tools.msg("ready", "all")
    run_checks(globals())
