"""Random trees, gathered and broadcast by 1 to 5 ranks on one machine or on pretended ones, against plain Python loops.

    python -m benchmarks.soak_trees

Hypothesis draws the structure (dicts, tuples, named tuples, lists of Python values, numbers, text, None), dtypes,
shapes and memory orders; all ranks draw the same, and each fills its own with rows of its own number and values. Each
tree is gathered in rank order, by an index, to all ranks, and broadcast as an object and as weights.
"""

import argparse
import itertools
import sys
from collections import namedtuple
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import mpi_util
from benchmarks import soak

GOAL = 10_000
A_JOB = 250  # trees
RANKS, MACHINES = (3, 1, 2, 5, 4), (0, 2, 3)
SPEC = np.dtype([("x", "f4"), ("n", "i8", (2,)), ("s", "S3")])
DTYPES = [
    "?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g", "c8", "c16", "G",
    ">i4", ">f8", "M8[s]", "m8[ns]", "S3", "U2", "V5", SPEC,
]  # fmt: skip
Pair = namedtuple("Pair", "first second")
KEYS = st.sampled_from(["obs", "act", "a b", "é", "x.y", 7, ("t", 1), "0"])

arrays = st.tuples(
    st.just("array"),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(["C", "F", "strided", "reversed"]),
)
leaves = st.one_of(
    arrays, arrays, arrays, st.tuples(st.sampled_from(["float", "int", "scalar", "0-d", "list", "text", "none"]))
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.just("dict"), st.dictionaries(KEYS, inner, max_size=4)),
        st.tuples(st.just("tuple"), st.lists(inner, max_size=3)),
        st.tuples(st.just("pair"), st.lists(inner, min_size=2, max_size=2)),
    ),
    max_leaves=10,
)


def main() -> None:
    """Jobs of 250 trees, each with another number of ranks and machines."""
    parser = soak.command_line(__doc__, repeats=GOAL)
    parser.add_argument("--trees", type=int, default=A_JOB, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return part(args)

    def case(mpi: str, number: int) -> tuple[int, dict[str, float]]:
        n, machines = RANKS[number % len(RANKS)], MACHINES[number // len(RANKS) % len(MACHINES)]
        n_trees = min(args.trees, args.repeats)
        words = ["--part", n, "--trees", n_trees, "--case", number]
        with soak.box() as box:
            where = {"MPI_UTIL_MACHINES": str(min(machines, n))} if machines else {}
            box.run([sys.executable, "-m", "benchmarks.soak_trees", *words], mpi, 900.0, **where)
        return n_trees, {}

    claims = lambda done, failures, _: soak.count_claims("random trees", GOAL, done, failures)  # noqa: E731
    soak.soak(args, args.mpi, case, claims)


def part(args: argparse.Namespace) -> None:
    """All trees of one job."""
    if mpi_util.mpi_fork(int(str(args.part))) == "parent":
        return

    @seed(args.case)
    @settings(
        max_examples=args.trees, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(tree=trees, number=st.integers(0, 2**20))
    def body(tree: Any, number: int) -> None:
        try:
            check_tree(tree, number)
        except mpi_util.RankMismatchError:
            raise
        except Exception as error:
            mpi_util.fail(f"rank {mpi_util.rank}: {type(error).__name__}: {error}; seed {number}, tree {tree}")

    body()


def check_tree(tree: Any, number: int) -> None:
    """All ways to move one tree."""
    rank, size = mpi_util.rank, mpi_util.nworkers
    parts = [make(tree, np.random.default_rng([number, k])) for k in range(size)]
    expected = join(tree, parts)
    got = mpi_util.rank0_accum_batches(parts[rank])
    same(got, expected) if rank == 0 or size == 1 else same(got, parts[rank])
    same(mpi_util.all_accum_batches(parts[rank]), expected)

    rng = np.random.default_rng([number, 1000])
    owners = rng.integers(0, size, int(rng.integers(1, 7)))  # who has segment i
    index = rng.permutation(len(owners)) * 3
    segments = [make(tree, np.random.default_rng([number, 2000, i])) for i in range(len(owners))]
    mine = np.flatnonzero(owners == rank)
    got = mpi_util.rank0_accum_batches([segments[i] for i in mine], index=[int(index[i]) for i in mine])
    if rank == 0:
        same(got, join(tree, [segments[i] for i in np.argsort(index)]))
    travels = {"object": parts[0]}
    got = mpi_util.bcast(travels if rank == 0 else None)
    same(got, travels, native=True)  # NumPy's pickle may change a byte order

    fixed = [list(arrays_of(make(tree, np.random.default_rng([number, 3000, k]), rows=3))) for k in range(size)]
    if fixed[0]:
        weights = {"deep": {str(i): (array,) for i, array in enumerate(fixed[rank])}}
        mpi_util.rank0_bcast_wts(weights)
        for i, array in enumerate(fixed[0]):
            same(weights["deep"][str(i)][0], array)


def make(tree: Any, rng: np.random.Generator, rows: int | None = None) -> Any:
    """A batch of that structure."""
    kind = tree[0]
    if kind == "dict":
        return {key: make(item, rng, rows) for key, item in tree[1].items()}
    if kind in ("tuple", "pair"):
        items = [make(item, rng, rows) for item in tree[1]]
        return Pair(*items) if kind == "pair" else tuple(items)
    if kind == "array":
        return filled(rng, (int(rng.integers(0, 5)) if rows is None else rows, *tree[2]), np.dtype(tree[1]), tree[3])
    value = int(rng.integers(0, 100))
    words = [[value, "word", None, (1.5, "x")][i % 4] for i in range(value % 5)]
    plain = {"float": float(value), "int": value, "scalar": np.float32(value), "0-d": np.array(value, "i2")}
    return plain.get(kind, {"list": words, "text": f"text {value}", "none": None}.get(kind))


def filled(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, order: str) -> np.ndarray:
    """Random bytes, but where not every byte is a value."""
    if dtype.kind in "SUMmb":
        array = rng.integers(0, 2 if dtype.kind == "b" else 90, shape).astype(dtype)
    elif dtype.kind == "V" and dtype.names:
        array = np.zeros(shape, dtype)
        array["x"], array["s"] = rng.integers(0, 90, shape), b"ab"
        array["n"][..., 1] = rng.integers(0, 90, shape)
    elif dtype.char in "gG":
        array = rng.standard_normal(shape).astype(dtype)
    else:
        array = np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy()
    if order == "F":
        return np.asfortranarray(array)
    if order == "reversed":
        return array[::-1].copy()[::-1]
    if order == "strided":
        wide = np.zeros((*shape, 2), dtype)
        wide[..., 1] = array
        return wide[..., 1]
    return array


def join(tree: Any, parts: list[Any]) -> Any:
    """What a gather of these gives, by the plain way."""
    kind = tree[0]
    if kind == "dict":
        return {key: join(item, [part[key] for part in parts]) for key, item in tree[1].items()}
    if kind in ("tuple", "pair"):
        items = [join(item, [part[i] for part in parts]) for i, item in enumerate(tree[1])]
        return Pair(*items) if kind == "pair" else tuple(items)
    if kind == "none":
        return None
    if kind == "text":
        return list(parts)
    if kind == "list":
        return list(itertools.chain(*parts))
    if kind == "array":
        whole = np.zeros((sum(map(len, parts)), *tree[2]), np.dtype(tree[1]))
        rows = iter(range(len(whole)))
        for part in parts:
            for row in part:
                whole[next(rows)] = row
        return whole
    return np.stack([np.asarray(part) for part in parts])


def arrays_of(batch: Any) -> Any:
    """The arrays of a batch."""
    if isinstance(batch, np.ndarray):
        yield batch
    elif isinstance(batch, (dict, tuple)):
        for item in batch.values() if isinstance(batch, dict) else batch:
            yield from arrays_of(item)


def same(got: Any, expected: Any, native: bool = False) -> None:
    """ValueError unless types, order of keys, dtypes (but with `native` their byte order), shapes, bytes are equal."""
    if isinstance(expected, (np.ndarray, np.generic)):
        a, b = np.asarray(got), np.asarray(expected)
        if native:
            a, b = (x.astype(x.dtype.newbyteorder("=")) for x in (a, b))
        ok = a.dtype == b.dtype and a.shape == b.shape
        ok = ok and (np.array_equal(a, b) if a.dtype.char in "gG" else a.tobytes() == b.tobytes())
    elif isinstance(expected, dict):
        ok = type(got) is dict and list(got) == list(expected)
        for key in expected if ok else ():
            same(got[key], expected[key], native)
    elif isinstance(expected, tuple):
        ok = type(got) is type(expected) and len(got) == len(expected)
        for a, b in zip(got, expected):
            same(a, b, native)
    else:
        ok = type(got) is type(expected) and got == expected
    if not ok:
        raise ValueError(f"got {got!r} in place of {expected!r}")


if __name__ == "__main__":
    main()
