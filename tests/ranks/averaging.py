"""Sums and means of many arrays as one block."""

import numpy as np
from harness import fork, raises, run_checks

import mpi_util
from mpi_util.collectives import channel
from mpi_util.collectives.messages import Messages
from mpi_util.collectives.reduce import average

fork()


def add(op, make, comm):
    return average(op, make, comm=comm, divide=False)


def arrays(rank, n):
    rng = np.random.default_rng(rank)
    return {
        "w": rng.standard_normal((n, 3)).astype("f4"),
        "wide": rng.standard_normal(n),
        "none": None,
        "half": rng.standard_normal(5).astype("f2"),
        "strided": rng.standard_normal((n, 4)).astype("f4")[:, ::2],
        "zero": np.zeros((0, 2), "f4"),
        "number": np.array(float(rank)),
        "complex": rng.standard_normal(2) + 1j * rank,
    }


def check_mean_and_sum(comm, rank, size):
    for n in (1, 7, 7, 3000, 60_000, 9):  # along with the agreement, in a block, and back
        for function, divisor in ((average, size), (add, 1)):
            mine = arrays(rank, n)
            before = dict(mine)
            got = function("test", lambda mine=mine: mine, comm=comm)
            for name, array in got.items():
                assert array is before[name]
                if array is None:
                    continue
                total = sum(arrays(k, n)[name].astype("f4" if name == "half" else array.dtype) for k in range(size))
                expected = (total / divisor).astype(array.dtype)
                assert array.dtype == before[name].dtype and array.tobytes() == expected.tobytes(), (name, n)


def check_many_rounds(comm, rank, size):
    x = np.zeros(10)
    for i in range(100):
        if rank == i % size and i % 50 == 0:
            import time

            time.sleep(0.02)
        x[:] = i + rank
        add("test", lambda: {"x": x}, comm=comm)
        assert (x == sum(i + k for k in range(size))).all()


def check_a_failure_amid_it_is_everybodys(comm, rank, size):
    """After all have agreed: while the arrays are copied to where they are added up, or sent there."""
    write_rows, send = channel.write_rows, Messages.send
    machine = channel.channel_of(comm).machine

    def no_room(*_):
        Messages.send = send
        raise MemoryError("no room")

    for who in range(size if size > 1 else 0):
        if rank == who and machine[who] == 0:
            channel.write_rows = no_room
        elif rank == who:
            Messages.send = no_room
        raises(Exception, "no room", lambda: average("test", lambda: {"x": np.zeros(200_000)}, comm=comm))
        channel.write_rows = write_rows
        x = np.full(200_000, float(rank))
        add("test", lambda x=x: {"x": x}, comm=comm)
        assert (x == sum(range(size))).all()


def check_differences_are_found(comm, rank, size):
    if size == 1:
        return
    last = rank == size - 1
    for _ in range(2):
        raises(
            mpi_util.RankMismatchError,
            f"rank {size - 1}: None",
            lambda: average("test", lambda: {"a": np.zeros(2), "b": None if last else np.zeros(3)}, comm=comm),
        )
        raises(
            mpi_util.RankMismatchError,
            f"rank {size - 1}: float64 (90000,)",
            lambda: average("test", lambda: {"a": np.zeros(90000 if last else 2)}, comm=comm),
        )
        raises(
            mpi_util.RankMismatchError,
            ": one at averaging.py:",
            lambda: average("two" if last else "one", lambda: {"a": np.zeros(2)}, comm=comm),
        )
        raises(
            mpi_util.RankMismatchError,
            ": all_sum at averaging.py:",
            lambda: mpi_util.all_sum(1, comm=comm) if last else average("test", lambda: {"a": np.zeros(2)}, comm=comm),
        )
        raises(
            mpi_util.RankMismatchError,
            ": all_sum at averaging.py:",
            lambda: (
                mpi_util.all_sum(1, comm=comm) if rank == 0 else average("test", lambda: {"a": np.zeros(2)}, comm=comm)
            ),
        )
        x = np.ones(3)
        average("test", lambda x=x: {"x": x}, comm=comm)
        assert (x == 1).all()


def check_an_error_of_one_rank_is_everybodys(comm, rank, size):
    def bring():
        if rank == size - 1:
            raise ValueError("no gradient")
        return {"a": np.zeros(2)}

    for _ in range(2):
        raises(Exception, "no gradient", lambda: average("test", bring, comm=comm))
        raises(
            mpi_util.BatchError,
            "cannot be averaged",
            lambda: average("test", lambda: {"i": np.zeros(2, int)}, comm=comm),
        )
        average("test", lambda: {"a": np.zeros(2)}, comm=comm)


run_checks(globals())
