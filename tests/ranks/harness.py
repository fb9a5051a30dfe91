"""Runs every check of a rank program on each communicator: this process alone, the world, and a duplicate of it."""

import sys

import mpi_util


def fork() -> None:
    """Becomes the ranks that argv[1] asks for."""
    if mpi_util.mpi_fork(int(sys.argv[1])) == "parent":
        sys.exit()


def run_checks(names: dict) -> None:
    """Calls each `check_...(comm, rank, size)` of a program for each communicator."""
    checks = [check for name, check in names.items() if name.startswith("check_")]
    comms = [None]
    if mpi_util.nworkers > 1:
        from mpi4py import MPI

        number, n = mpi_util.rank, mpi_util.nworkers
        mixed = MPI.COMM_WORLD.Split(0, number % 2 * n + number)  # ranks of one machine do not follow each other
        comms += [MPI.COMM_SELF, MPI.COMM_WORLD, mixed]
    for comm in comms:
        rank, size = (comm.Get_rank(), comm.Get_size()) if comm else (mpi_util.rank, mpi_util.nworkers)
        for check in checks:
            check(comm, rank, size)
    if comms[-1] is not None:
        comms[-1].Free()
    mpi_util.print0(f"{len(checks)} checks on {len(comms)} communicators")


def raises(kind: type, text: str, call) -> None:
    """Requires that `call` raises `kind` with `text` in its message."""
    try:
        call()
    except kind as error:
        assert text in str(error), f"{text!r} is not in: {error}"
        return
    raise AssertionError(f"no {kind.__name__}")
