"""Gathers and broadcasts of random sizes, each checked byte by byte, in one run under each MPI; and its memory.

    python -m benchmarks.soak_collectives

Sizes from 0 to 50 MB over all ranks: most below 64 KB, one in a thousand above 10 MB. PSS of each rank after 1,000
rounds, in which the largest have been, and at the end.
"""

import argparse
import ctypes
import functools
import gc
import json
import sys
from typing import Any

import numpy as np
import psutil

import mpi_util
from benchmarks import record, soak

LARGEST = 50_000_000
SIZES, SHARES = (0, 1 << 16, 1 << 20, 10_000_000, LARGEST), (0.87, 0.11, 0.019, 0.001)
SETTLED = 1000  # rounds
GOAL = 200_000  # 100,000 in one run under each MPI
KINDS = ("u1", "i2", "f4", "c16")


def main() -> None:
    """One run for each MPI."""
    args = soak.command_line(__doc__, repeats=GOAL, ranks="2").parse_args()
    if args.part:
        return part(args)
    rounds = args.repeats // len(args.mpi)

    def case(mpi: str, number: int) -> tuple[int, dict[str, float]]:
        with soak.box() as box:
            out = box.folder / "part.json"
            words = ["--ranks", args.ranks[0], "--repeats", rounds, "--case", number, "--part", out]
            box.run([sys.executable, "-m", "benchmarks.soak_collectives", *words], mpi, 6 * 3600.0)
            return rounds, json.loads(out.read_text())

    def claims(done: int, failures: int, measured: dict[str, Any]) -> list[dict[str, Any]]:
        found = soak.count_claims("gathers and broadcasts of 0 to 50 MB, each checked", GOAL, done, failures)
        text = "{}: PSS at the end / after 1,000 rounds"
        return found + [record.claim(text.format(m), v["growth"], at_most=1.05) for m, v in measured.items() if v]

    soak.soak(args, args.mpi, case, claims, unit="seconds")


def part(args: argparse.Namespace) -> None:
    """All rounds of one run; rank 0 writes what was measured."""
    if mpi_util.mpi_fork(args.ranks[0]) == "parent":
        return
    base = np.random.default_rng(args.case).integers(0, 256, LARGEST + (1 << 20), np.uint8)
    settled = min(SETTLED, args.repeats // 2)
    total = 0
    for number in range(args.repeats):
        rng = np.random.default_rng([args.case, number])
        limit = LARGEST if number in (10, 11) else 0
        total += (bcast if number % 2 else gather)(base, number, rng, limit)
        if number + 1 == settled:
            early = memory_mb()
    late = memory_mb()
    growth = max(b / a for a, b in zip(early, late))
    if mpi_util.rank == 0:
        record.write_part(args.part, {"growth": growth, "pss_mb": max(late), "early_mb": max(early), "bytes": total})


def size_of(rng: np.random.Generator) -> int:
    place = rng.choice(len(SHARES), p=SHARES)
    return int(rng.integers(SIZES[place], SIZES[place + 1]))


def arrays(base: np.ndarray, n: int, kind: str, start: int) -> dict[str, np.ndarray]:
    """About n bytes of the base from `start` on: rows of a kind, and the rest as bytes. All ranks know all of them."""
    row = np.dtype(kind).itemsize * 3
    piece = base[start : start + n]
    whole = len(piece) // row * row
    return {
        "rows": piece[:whole].view(f"V{row}").view((kind, 3)) if whole else np.zeros((0, 3), kind),
        "rest": piece[whole:],
    }


def gather(base: np.ndarray, number: int, rng: np.random.Generator, total: int) -> int:
    """One gather, in the order of an index every third time; checked on rank 0. Returns its bytes."""
    size, rank = mpi_util.nworkers, mpi_util.rank
    total, kind = total or size_of(rng), KINDS[rng.integers(len(KINDS))]
    cuts = np.sort(rng.integers(0, total + 1, size - 1))
    lengths = np.diff([0, *cuts, total])
    starts = rng.integers(0, 1 << 20, size)
    order = rng.permutation(size) if number % 3 == 0 else np.arange(size)
    parts = [functools.partial(arrays, base, int(n), kind, int(s)) for n, s in zip(lengths, starts)]
    mine = parts[rank]()
    if number % 3 == 0:
        got = mpi_util.rank0_accum_batches([mine], index=[int(order[rank])])
    else:
        got = mpi_util.rank0_accum_batches(mine)
    if rank == 0:
        for name in ("rows", "rest"):
            at = 0
            for k in np.argsort(order):
                piece = parts[k]()[name]
                check(got[name][at : at + len(piece)], piece, number, name)
                at += len(piece)
            if at != len(got[name]):
                mpi_util.fail(f"round {number}: {len(got[name])} rows of '{name}' in place of {at}")
    return total


def bcast(base: np.ndarray, number: int, rng: np.random.Generator, n: int) -> int:
    """One broadcast, checked on every rank. Returns its bytes."""
    n, kind, start = n or size_of(rng), KINDS[rng.integers(len(KINDS))], int(rng.integers(0, 1 << 20))
    whole = arrays(base, n, kind, start)
    mine = {name: a if mpi_util.rank == 0 else np.zeros_like(a) for name, a in whole.items()}
    mpi_util.rank0_bcast_wts(mine)
    for name, array in whole.items():
        check(mine[name], array, number, name)
    return n


def check(got: np.ndarray, expected: np.ndarray, number: int, name: str) -> None:
    """Ends the job if a byte is wrong."""
    same = got.dtype == expected.dtype and got.shape == expected.shape
    if not same or not np.array_equal(np.ascontiguousarray(got).view(np.uint8), expected.view(np.uint8)):
        mpi_util.fail(f"round {number}: wrong bytes in '{name}' on rank {mpi_util.rank}")


def memory_mb() -> list[float]:
    """PSS of each rank, without what malloc keeps of memory that was freed: the temporaries of this program."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pss = psutil.Process().memory_full_info().pss / 1e6
    return list(mpi_util.all_accum_batches({"pss": np.array([pss])})["pss"])


if __name__ == "__main__":
    main()
