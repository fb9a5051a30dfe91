"""128 ranks on this machine: what they gather, broadcast, add up and deal, and the bits of a program, are right.

    python -m benchmarks.soak_ranks

Each case runs examples/same_bits.py on 1 and on 128 ranks, which must print the same, and a job in which all ranks
check every collective call.
"""

import functools
import subprocess
import sys
import time

import numpy as np

import mpi_util
from benchmarks import record, soak

TIMEOUT_S = 600.0
SHORT = ("--episodes", "160", "--iterations", "3")


def main() -> None:
    """One case for each MPI and repeat."""
    parser = soak.command_line(__doc__, repeats=2, ranks="128")
    args = parser.parse_args()
    n = args.ranks[0]
    if args.part:
        return part(n)

    def case(mpi: str, number: int) -> tuple[int, dict[str, float]]:
        began = time.monotonic()
        with soak.box() as box:
            box.run([sys.executable, "-m", "benchmarks.soak_ranks", "--ranks", n, "--part", "x"], mpi, TIMEOUT_S)
            seconds = time.monotonic() - began
            said = {k: same_bits(box, mpi, k, number) for k in (1, n)}
        if said[1] != said[n] or not said[1]:
            raise soak.CaseError(f"1 rank printed {said[1]!r}, {n} ranks {said[n]!r}")
        return 1, {"seconds of the collective calls, with the start": seconds}

    claims = functools.partial(soak.count_claims, f"jobs of {n} ranks with the bits of one rank", 2)
    soak.soak(args, args.mpi, case, lambda done, failures, _: claims(done, failures))


def same_bits(box: soak.Box, mpi: str, n: int, seed: int) -> str:
    """The last line of the example's output, its checksum."""
    command = [sys.executable, "examples/same_bits.py", "--nprocs", str(n), "--seed", str(seed), *SHORT]
    done = subprocess.run(
        command, cwd=record.ROOT, env=box.environment(mpi), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise soak.CaseError(f"{n} ranks: status {done.returncode}: {done.stderr[-500:]}")
    return done.stdout.splitlines()[-1]


def part(n: int) -> None:
    """Every collective call once or twice, with expectations from rank and size."""
    if mpi_util.mpi_fork(n) == "parent":
        return
    rank, size = mpi_util.rank, mpi_util.nworkers
    for round_ in range(3):
        rows = 1 + (rank + round_) % 5
        got = mpi_util.all_accum_batches({"x": np.full((rows, 50), rank), "n": rank})
        expect(np.array_equal(got["x"][:, 0], np.repeat(np.arange(size), [1 + (k + round_) % 5 for k in range(size)])))
        expect(np.array_equal(got["n"], np.arange(size)))
        taken = mpi_util.deal(5 * size)
        got = mpi_util.rank0_accum_batches([{"i": np.full(2, i)} for i in taken], index=taken.taken)
        expect(rank > 0 or np.array_equal(got["i"], np.repeat(np.arange(5 * size), 2)))
        weights = {"w": np.full(300_000, float(rank)), "b": np.full(3, rank)}
        mpi_util.rank0_bcast_wts(weights)
        expect(not weights["w"].any() and not weights["b"].any())
        expect(mpi_util.all_sum(rank) == size * (size - 1) // 2)
        weights["w"][:] = rank
        mpi_util.all_avg_wts(weights)
        expect(bool((weights["w"] == (size - 1) / 2).all()))


def expect(right: bool) -> None:
    if not right:
        mpi_util.fail(f"wrong result on rank {mpi_util.rank}")


if __name__ == "__main__":
    main()
