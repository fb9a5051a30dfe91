"""Gather, broadcast, average and weight_sync with more than 2 GiB, and with more than 2^31 elements, on both MPIs.

    python -m benchmarks.soak_large          # needs 14 GB of free memory; waits for it

Each in shared memory, and by MPI between two pretended machines. Every byte is checked.
"""

import functools
import multiprocessing
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil

import mpi_util
from benchmarks import soak
from mpi_util.collectives.reduce import average
from mpi_util_weight_sync import MPIWeightSyncScheme, MultiProcessWeightSyncScheme, WeightSyncScheme

ELEMENTS = 2**31 + 4099
PERIOD = 251
BLOCK = PERIOD << 18
NEEDS = 7.0  # bytes for each element, at most
PATIENCE_S = 1800.0
TIMEOUT_S = 1200.0


def main() -> None:
    """Each case once for each MPI and number of machines."""
    parser = soak.command_line(__doc__, repeats=0)
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="int8 elements (default: %(default)s)")
    parser.add_argument("--only", choices=CASES, help="only this one")
    args = parser.parse_args()
    if args.part:
        return part(args.elements, str(args.part))
    names = [args.only] if args.only else list(CASES)
    groups = [f"{mpi}, {n} machine" + "s" * (n > 1) for mpi in args.mpi for n in (1, 2)]
    args.repeats = args.repeats or len(names) * len(groups)

    def case(group: str, number: int) -> tuple[int, dict[str, float]]:
        mpi, _, machines = group.partition(", ")
        name, began = names[number % len(names)], time.monotonic()
        while psutil.virtual_memory().available < args.elements * NEEDS:
            if time.monotonic() - began > PATIENCE_S:
                raise soak.CaseError("too little free memory")
            time.sleep(5)
        with soak.box() as box:
            words = ["--elements", args.elements, "--part", name]
            command = [sys.executable, "-m", "benchmarks.soak_large", *words]
            box.run(command, mpi, TIMEOUT_S, MPI_UTIL_MACHINES=machines[0])
        return 1, {name: time.monotonic() - began}

    goal = len(CASES) * 4
    claims = functools.partial(soak.count_claims, f"cases beyond 2 GiB and 2^31 elements ({', '.join(CASES)})", goal)
    soak.soak(args, groups, case, lambda done, failures, _: claims(done, failures), elements=args.elements)


def part(n: int, name: str) -> None:
    """One case on two ranks."""
    if mpi_util.mpi_fork(2) == "parent":
        return
    CASES[name](n)


def blocks(n: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + BLOCK, n)) for start in range(0, n, BLOCK))


def pattern(n: int, seed: int, dtype: str = "i1") -> np.ndarray:
    """n values that repeat every 251."""
    whole, block = np.empty(n, dtype), np.resize((np.arange(PERIOD) * 3 + seed) % 100, min(n, BLOCK)).astype(dtype)
    for start, stop in blocks(n):
        whole[start:stop] = block[: stop - start]
    return whole


def check(array: np.ndarray, n: int, seed: int, dtype: str = "i1", factor: float = 1) -> None:
    """Ends the job if that is not the pattern. In blocks: there is no room for a mask of all."""
    block = (np.resize((np.arange(PERIOD) * 3 + seed) % 100, min(n, BLOCK)) * factor).astype(dtype)
    if array.dtype != dtype or len(array) != n:
        mpi_util.fail(f"{array.dtype} {array.shape} in place of {n} {dtype}")
    for start, stop in blocks(n):
        if not np.array_equal(array[start:stop], block[: stop - start]):
            mpi_util.fail(f"wrong values from {start} to {stop} on rank {mpi_util.rank}")


def gather(n: int) -> None:
    """The last rank has all but three."""
    mine = 3 if mpi_util.rank == 0 else n
    got = mpi_util.rank0_accum_batches({"x": pattern(mine, mpi_util.rank)})["x"]
    if mpi_util.rank == 0:
        check(got[:3], 3, 0)
        check(got[3:], n, 1)


def bcast(n: int) -> None:
    weights = {"w": pattern(n, mpi_util.rank)}
    mpi_util.rank0_bcast_wts(weights)
    check(weights["w"], n, 0)


def averaged(n: int) -> None:
    """float32: a quarter as many elements, beyond 2 GiB. The mean of x and 3 x is 2 x."""
    n //= 4
    x = pattern(n, 5, "f4")
    x *= 1 + 2 * mpi_util.rank
    average("large", lambda: {"x": x})
    check(x, n, 5, "f4", factor=2)


def synchronised(scheme: WeightSyncScheme, n: int, index: int | None) -> None:
    """A receiver: gets two versions."""
    model = {"w": np.zeros(n, "i1")}
    scheme.init_on_receiver(model_id="large", worker_idx=index, model=model)
    scheme.connect(background=False)
    check(model["w"], n, 1)
    scheme.receive()
    check(model["w"], n, 2)
    scheme.shutdown()


def send(scheme: WeightSyncScheme, model: dict[str, np.ndarray]) -> None:
    scheme.connect()
    for start, stop in blocks(len(model["w"])):
        model["w"][start:stop] = (model["w"][start:stop] + 1) % 100
    scheme.send()
    scheme.shutdown()


def sync_ranks(n: int) -> None:
    scheme: Any = MPIWeightSyncScheme(timeout=TIMEOUT_S)
    if mpi_util.rank:
        return synchronised(scheme, n, None)
    model = {"w": pattern(n, 1)}
    scheme.init_on_sender(model_id="large", model=model)
    send(scheme, model)


def sync_processes(n: int) -> None:
    """Rank 0 and a process of its own; the other rank has nothing to do."""
    if mpi_util.rank:
        return
    scheme = MultiProcessWeightSyncScheme(timeout=TIMEOUT_S)
    model = {"w": pattern(n, 1)}
    scheme.init_on_sender(model_id="large", model=model, num_workers=1)
    worker = multiprocessing.get_context("spawn").Process(target=synchronised, args=(scheme, n, 0))
    worker.start()
    send(scheme, model)
    worker.join()
    if worker.exitcode:
        mpi_util.fail(f"the worker ended with status {worker.exitcode}")


CASES = {
    "gather": gather, "broadcast": bcast, "average": averaged, "weight_sync, ranks": sync_ranks,
    "weight_sync, processes": sync_processes,
}  # fmt: skip

if __name__ == "__main__":
    main()
