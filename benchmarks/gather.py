"""Gathering a batch to rank 0: rank0_accum_batches against one memcpy of the same bytes, and against comm.gather.

    python -m benchmarks.gather

62 MB in all, rows as Humanoid-v4 makes them, in equal parts on all ranks. Timed on rank 0, from when all ranks are
ready until it has the rows of all. The memcpy is one numpy.copyto by rank 0 into memory that was written before, while
the others sleep. comm.gather is not charged for joining the parts that it returns. "copies alone" is what the kernel
and the memory take: each rank copies its rows to their place in memory that all have mapped, and meets the others;
nothing is agreed, planned or answered.
"""

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import mpi_util
from benchmarks import record
from mpi_util.host import segments

ROW_BYTES = 4 * (376 + 17 + 1 + 1)
SETTLE_S = 0.01  # until the other ranks sleep in their next wait


def main() -> None:
    """Starts a part for each rank count and MPI library, and saves what they measured."""
    parser = record.command_line(__doc__, repeats=40, ranks="2,4,10", mpi="mpich,openmpi")
    parser.add_argument("--rows", type=int, default=39240, help="of all ranks together (default: 39240, 62 MB)")
    args = parser.parse_args()
    if args.part:
        return part(args)
    samples, claims = {}, []
    for mpi in args.mpi:
        for n in args.ranks:
            seconds = record.run_part(
                "benchmarks.gather", mpi, "--ranks", n, "--rows", args.rows, "--repeats", args.repeats
            )
            found = samples[f"{mpi}, {n} ranks"] = {name: record.spread(values) for name, values in seconds.items()}
            ours, memcpy, pickled = (found[name]["median"] for name in ("rank0_accum_batches", "memcpy", "comm.gather"))
            claims.append(record.claim(f"gather, {n} ranks, {mpi}: time / memcpy", ours / memcpy, at_most=1.0))
            claims.append(record.claim(f"gather, {n} ranks, {mpi}: comm.gather / time", pickled / ours, at_least=10))
    record.save(args, samples, claims, bytes=args.rows * ROW_BYTES, unit="seconds")


def part(args: argparse.Namespace) -> None:
    """Measures on one number of ranks."""
    if mpi_util.mpi_fork(args.ranks[0]) == "parent":
        return
    from mpi4py import MPI

    batch = rows_of_rank(args.rows)
    batch_of_all: dict = {}

    def gather() -> None:
        batch_of_all.update(mpi_util.rank0_accum_batches(batch))  # the last one is held until then, as train.py does

    place = shared_rows(args.rows, len(batch["actions"]))
    own = np.concatenate([value.reshape(len(value), -1) for value in batch.values()], axis=1)

    def copies() -> None:
        np.copyto(place, own)
        mpi_util.all_sum(0)

    def pickled() -> list | None:
        return MPI.COMM_WORLD.gather(batch)

    source = np.ones(args.rows * ROW_BYTES, np.uint8)
    target = np.zeros_like(source)

    def memcpy() -> None:
        np.copyto(target, source)

    alternatives = {"memcpy": partial(clock_alone, memcpy)}
    alternatives |= {"rank0_accum_batches": partial(clock, gather), "comm.gather": partial(clock, pickled)}
    alternatives["copies alone"] = partial(clock, copies)
    seconds = record.in_turn(alternatives, args.repeats, warmup=3)
    parts = pickled()
    if mpi_util.rank == 0:
        for key, values in batch_of_all.items():
            np.testing.assert_array_equal(values, np.concatenate([of_rank[key] for of_rank in parts]))
        record.write_part(args.part, seconds)


def clock(call: Callable[[], Any]) -> float:
    """Seconds that a collective call takes on this rank, from when all ranks are ready."""
    mpi_util.all_sum(0)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def clock_alone(call: Callable[[], Any]) -> float:
    """Seconds that a call takes on rank 0 while the others wait asleep; nan elsewhere."""
    mpi_util.all_sum(0)
    if mpi_util.rank:
        return math.nan
    time.sleep(SETTLE_S)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def shared_rows(n_rows: int, n_own: int) -> np.ndarray:
    """Collective: this rank's place in shared memory for the rows of all ranks: float32 (n_own, columns)."""
    segment = segments.Segment(n_rows * ROW_BYTES) if mpi_util.rank == 0 else None
    ticket = mpi_util.bcast(segment.ticket if segment else None)
    memory = segment.map if segment else segments.attach(ticket)[1]
    first = mpi_util.rank * n_rows // mpi_util.nworkers
    return np.ndarray((n_rows, ROW_BYTES // 4), np.float32, memory)[first : first + n_own]


def rows_of_rank(n_rows: int) -> dict[str, np.ndarray]:
    """This rank's part of a batch of `n_rows` steps, float32, all values different."""
    rank, n = mpi_util.rank, mpi_util.nworkers
    rows = range(rank * n_rows // n, (rank + 1) * n_rows // n)
    rng = np.random.default_rng(rank)
    shapes = {"observes": (376,), "actions": (17,), "advantages": (), "disc_sum_rew": ()}
    return {key: rng.standard_normal((len(rows), *shape), np.float32) for key, shape in shapes.items()}


if __name__ == "__main__":
    main()
