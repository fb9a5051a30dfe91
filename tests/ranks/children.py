"""A rank starts processes by multiprocessing, which run this file's top level again, and its mpi_fork with it."""

import multiprocessing
import sys

import mpi_util

if mpi_util.mpi_fork(int(sys.argv[1])) == "parent":
    sys.exit()


def double(x):
    return 2 * x


if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[2]).Pool(2) as pool:
        numbers = pool.map(double, [mpi_util.rank, 10])
    gathered = mpi_util.rank0_gather(numbers)
    mpi_util.print0(gathered)
