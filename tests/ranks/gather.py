"""Gathers against a plain NumPy loop: dtypes, shapes, memory orders, structures, order by index, mismatches, leases."""

import time
from collections import Counter, namedtuple
from functools import partial

import numpy as np
from harness import fork, raises, run_checks
from hypothesis import given, settings
from hypothesis import strategies as st

import mpi_util

fork()

STRUCTURED = np.dtype([("x", "f4"), ("n", "i8", (2,))])
DTYPES = ["?", "i1", "u1", "i2", "u4", "i8", "f2", "f4", "f8", "c8", "c16", ">f8", "M8[s]", "S3", "U2", STRUCTURED]
Pair = namedtuple("Pair", "first second")


def filled(seed, shape, dtype, order):
    """An array of random bytes' worth of values, in the memory order that is asked for."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2, shape) if dtype == "?" else rng.integers(0, 100, shape)
    if dtype == STRUCTURED:
        array = np.zeros(shape, STRUCTURED)
        array["x"], array["n"][..., 0] = values, values
    else:
        array = values.astype(dtype)
    if order == "F":
        return np.asfortranarray(array)
    if order == "strided":
        wide = np.zeros((*array.shape, 2), array.dtype)
        wide[..., 1] = array
        return wide[..., 1]
    return array


def same(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, a.shape, b.dtype, b.shape)
    assert a.tobytes() == np.ascontiguousarray(b).tobytes()


leaf = st.tuples(
    st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.sampled_from(["C", "F", "strided"])
)


def check_any_arrays(comm, rank, size):
    @settings(derandomize=True, database=None, max_examples=30 if comm is None else 8, deadline=None)
    @given(leaves=st.lists(leaf, min_size=1, max_size=4), seed=st.integers(0, 2**20))
    def body(leaves, seed):
        def batch(k):
            rows = np.random.default_rng([seed, k]).integers(0, 5, len(leaves))  # unequal, and sometimes none
            return {
                f"leaf{i}": filled([seed, k, i], (rows[i], *trailing), dtype, order)
                for i, (dtype, trailing, order) in enumerate(leaves)
            }

        own = batch(rank)
        got = mpi_util.rank0_accum_batches(own, comm=comm)
        if rank:
            assert got is own
            return
        assert list(got) == list(own)
        for name in own:
            parts = [batch(k)[name] for k in range(size)]
            same(got[name], np.concatenate(parts).astype(parts[0].dtype))  # concatenate would mend the byte order

    body()


def check_structures(comm, rank, size):
    def batch(k):
        tree = {
            "b": (np.full(k, k), (np.ones((1, 2)) * k, {"c": np.float32(k)})),
            "a": Pair(k, [float(k)] * k),
            "n": None,
        }
        return tree if k % 2 else dict(reversed(tree.items()))  # the order of keys never matters

    got = mpi_util.rank0_accum_batches(batch(rank), comm=comm)
    everywhere = mpi_util.all_accum_batches(batch(rank), comm=comm)
    for result in [got, everywhere] if rank == 0 else [everywhere]:
        assert list(result) == list(batch(rank))
        same(result["b"][0], np.concatenate([np.full(k, k) for k in range(size)]))
        same(result["b"][1][0], np.concatenate([np.ones((1, 2)) * k for k in range(size)]))
        same(result["b"][1][1]["c"], np.arange(size, dtype=np.float32))
        assert type(result["a"]) is Pair and result["n"] is None
        same(result["a"].first, np.arange(size))
        assert result["a"].second == [float(k) for k in range(size) for _ in range(k)]


def check_order_by_index(comm, rank, size):
    numbers = [i for i in range(7 * size) if (i + i // size) % size == rank]  # scattered over the ranks
    episodes = [{"x": np.full((i % 4, 2), i), "i": i, "names": [f"e{i}"]} for i in numbers]
    got = mpi_util.rank0_accum_batches(episodes, index=numbers, comm=comm)
    if rank:
        assert got is episodes
        return
    same(got["i"], np.sort(got["i"]))
    assert got["names"] == [f"e{i}" for i in got["i"]]
    same(got["x"], np.concatenate([np.full((i % 4, 2), i) for i in got["i"]]))


def check_ranks_without_segments(comm, rank, size):
    mine = [{"x": np.arange(3.0)}] if rank == size - 1 else []
    got = mpi_util.rank0_accum_batches(mine, index=range(len(mine)), comm=comm)
    assert rank or list(np.asarray(got["x"])) == [0, 1, 2]
    assert mpi_util.rank0_accum_batches([], index=[], comm=comm) == ({} if rank == 0 else [])


def check_deal_covers_all(comm, rank, size):
    for n in (0, 1, 25):
        mine = list(mpi_util.deal(n, comm=comm))
        everyones = mpi_util.all_accum_batches({"i": np.array(mine, np.int64)}, comm=comm)["i"]
        assert sorted(everyones) == list(range(n))
        closed = mpi_util.deal(25, comm=comm)
        mpi_util.all_sum(0, comm=comm)
        if rank == 0:
            closed.close()
            assert closed.closed
        mpi_util.all_sum(0, comm=comm)
        assert list(closed) == []


def check_deal_reaches_other_machines_while_rank_0_works(comm, rank, size):
    mpi_util.all_sum(0, comm=comm)
    mine = 0
    for _ in mpi_util.deal(8 * size, comm=comm):
        time.sleep(0.01)
        mine += 1
    assert mpi_util.all_sum(mine if rank else 0, comm=comm) > 0 or size == 1


def check_mismatches_are_raised_everywhere(comm, rank, size):
    last = rank == size - 1 and size > 1
    for batch, what in [
        ({"x": np.zeros(2), **({"y": np.zeros(1)} if last else {})}, "'y' is missing on rank 0 and float64 (*,) on"),
        (
            {"x": np.zeros(2, "f4" if last else "f8")},
            f"'x' is float64 (*,) on rank 0 and float32 (*,) on rank {size - 1}",
        ),
        ({"x": np.zeros((2, 3 + last))}, "'x' is float64 (*, 3) on rank 0"),
    ]:
        if size > 1:
            raises(mpi_util.RankMismatchError, what, lambda batch=batch: mpi_util.rank0_accum_batches(batch, comm=comm))
    objects = {"x": np.array([{}] if last or size == 1 else [1], dtype=object if last or size == 1 else int)}
    raises(mpi_util.BatchError, "object", lambda: mpi_util.rank0_accum_batches(objects, comm=comm))
    twice = [{"x": np.zeros(1)}]
    if size > 1:
        raises(mpi_util.BatchError, "index 5", lambda: mpi_util.rank0_accum_batches(twice, index=[5], comm=comm))


def check_structures_that_differ_are_raised_everywhere(comm, rank, size):
    """Where all leaves are the same, by the same paths, too; and with any number of segments."""
    if size == 1:
        return
    x, last = np.zeros(2), rank == size - 1
    swapped = namedtuple("Pair", "second first")
    for usual, odd, what in [
        ({"a": (x, x)}, {"a": {0: x, 1: x}}, "'a' is tuple on rank 0 and dict on"),
        ({"a": Pair(x, x)}, {"a": swapped(x, x)}, "'a' is Pair(first, second) on rank 0 and Pair(second, first) on"),
        ({"a": Pair(x, x)}, {"a": (x, x)}, "'a' is Pair(first, second) on rank 0 and tuple on"),
        ({"x": x, "info": {}}, {"x": x}, "'info' is dict on rank 0 and missing on"),
        ({"x": x, "info": {"b": {}}}, {"x": x, "info": {}}, "'info/b' is dict on rank 0 and missing on"),
        ({"x": x, "info": {}}, {"x": x, "info": ()}, "'info' is dict on rank 0 and tuple on"),
        ({"x": x, "info": []}, {"x": x, "info": ()}, "'info' is list on rank 0 and tuple on"),
        ({"x": x, "info": None}, {"x": x, "info": {}}, "'info' is none on rank 0 and dict on"),
        ({}, (), "the batch is dict on rank 0 and tuple on"),
        ((x, x), {0: x, 1: x}, "the batch is tuple on rank 0 and dict on"),
    ]:
        batch = odd if last else usual
        for accumulate in (mpi_util.rank0_accum_batches, mpi_util.all_accum_batches):
            raises(mpi_util.RankMismatchError, what, partial(accumulate, batch, comm=comm))
            for n in (1, 3):
                call = partial(accumulate, [batch] * n, index=range(rank * n, (rank + 1) * n), comm=comm)
                raises(mpi_util.RankMismatchError, what, call)
            mine = [usual, batch]  # on the last rank they differ
            call = partial(accumulate, mine, index=[2 * rank, 2 * rank + 1], comm=comm)
            raises(mpi_util.BatchError, f"in number {2 * rank + 1} and" if rank == size - 1 else "in number", call)


def check_calls_that_differ(comm, rank, size):
    if size > 1:
        calls = [lambda: mpi_util.all_sum(1, comm=comm), lambda: mpi_util.rank0_accum_batches({}, comm=comm)]
        raises(mpi_util.RankMismatchError, "rank 1: rank0_accum_batches at gather.py:", calls[rank % 2])


def check_python_values_are_joined(comm, rank, size):
    batch = {"f": [np.float64(rank)], "pairs": [[rank, 1], [2]], "text": f"rank {rank}"}
    got = mpi_util.all_accum_batches(batch, comm=comm)
    assert got["f"] == list(range(size)) and got["text"] == [f"rank {k}" for k in range(size)]
    assert got["pairs"] == [row for k in range(size) for row in ([k, 1], [2])]


def check_rank_0_without_segments_gets_the_structure(comm, rank, size):
    mine = [{"deep": {"x": np.ones(1)}, "n": 1}] if rank == size - 1 else []
    for got in (
        mpi_util.rank0_accum_batches(mine, index=range(len(mine)), comm=comm),
        mpi_util.all_accum_batches(mine, index=range(len(mine)), comm=comm),
    ):
        if got is not mine:
            same(got["deep"]["x"], np.ones(1))
            same(got["n"], np.ones(1, int))


def check_a_broken_loop_takes_nothing_from_the_next_round(comm, rank, size):
    for _ in mpi_util.deal(3 * size, comm=comm):
        if rank == 0:
            break
    second = mpi_util.all_accum_batches({"i": np.array(list(mpi_util.deal(7, comm=comm)), int)}, comm=comm)["i"]
    assert sorted(second) == list(range(7))


def check_an_error_of_one_rank_leaves_nobody_behind(comm, rank, size):
    def collide():
        mpi_util.rank0_accum_batches({"a/b": 0, "a": {"b": 1}} if rank == size - 1 else {"a": {"b": 1}}, comm=comm)

    def mask():
        x = np.ma.masked_array([1.0], [True]) if rank == 0 else np.ones(1)
        mpi_util.rank0_accum_batches({"x": x}, comm=comm)

    def bad_index():
        mpi_util.rank0_accum_batches([{}], index=["no number" if rank == size - 1 else rank], comm=comm)

    raises(mpi_util.BatchError, "'a/b'", collide)
    raises(mpi_util.BatchError, "masked", mask)
    raises(mpi_util.BatchError, "all_sum: 'x' is <U1, which is text", lambda: mpi_util.all_sum("a", comm=comm))
    raises(mpi_util.BatchError, "pickle does not take this", lambda: mpi_util.bcast(lambda: 1, comm=comm))
    for function in (mpi_util.rank0_gather, mpi_util.rank0_accum_batches):
        raises(
            mpi_util.BatchError, "give a list of batches, not a str", partial(function, "ab", index=[0, 1], comm=comm)
        )
    several = {"x": [(1.0, 2.0), np.ones(3)]}  # of which the tuple alone would do
    raises(mpi_util.BatchError, "with ndarray objects", partial(mpi_util.rank0_accum_batches, several, comm=comm))
    raises(mpi_util.UsageError, "deal: n is a whole number", partial(mpi_util.deal, np.array([1, 2]), comm=comm))
    raises((TypeError, mpi_util.MpiUtilError), "", bad_index)
    assert mpi_util.all_sum(1, comm=comm) == size  # all are still in step


def check_a_communicator_has_one_group(comm, rank, size):
    wrong = ["a string"]
    if size > 1:
        from mpi4py import MPI

        whole = comm or MPI.COMM_WORLD
        half = whole.Split(rank % 2)
        none = whole.Split(MPI.UNDEFINED if rank else 0)  # rank 0's has rank 0 alone
        wrong += [half.Create_intercomm(0, whole, 1 - rank % 2), none if rank else "another"]
    for other in wrong:
        raises(mpi_util.UsageError, "of one group", lambda other=other: mpi_util.rank0_gather(rank, comm=other))


class Unreadable:
    def __init__(self):
        self.state = "some"

    def __setstate__(self, state):
        raise ValueError("cannot be read back")


def check_an_answer_that_cannot_be_read_leaves_nobody_behind(comm, rank, size):
    for _ in range(2):
        if rank:
            raises(ValueError, "cannot be read back", lambda: mpi_util.bcast(Unreadable(), comm=comm))
        else:
            mpi_util.bcast(Unreadable(), comm=comm)
        assert mpi_util.all_sum(np.ones(3), comm=comm).tolist() == [size] * 3


def check_lists_of_arrays_are_refused(comm, rank, size):
    """Structure or trajectories? The same answer at any number of ranks, and whether the counts agree or not."""
    for items in ([np.zeros(2)] * 2, [{"x": np.zeros(1)}] * (1 + rank), [[np.zeros(1)], 1]):
        for batch in (items, {"a": items}, [{"a": (1, items)}]):
            raises(mpi_util.BatchError, "rank0_gather", lambda b=batch: mpi_util.rank0_accum_batches(b, comm=comm))
    segments = [{"a": ([np.zeros(1)],)}] if rank == size - 1 else []
    index = range(len(segments))
    raises(mpi_util.BatchError, "'a/0'", lambda: mpi_util.all_accum_batches(segments, index=index, comm=comm))


def check_an_index_is_given_by_all_or_none(comm, rank, size):
    if size > 1:
        given = {"index": [0]} if rank == size - 1 else {}
        batch = [{"x": 1}] if rank == size - 1 else {"x": 1}
        text = f"rank {size - 1}: with index"
        raises(mpi_util.RankMismatchError, text, lambda: mpi_util.rank0_accum_batches(batch, comm=comm, **given))


def check_objects_of_any_kind(comm, rank, size):
    mine = {"x": np.full((40_000, 3), rank), "f": np.asfortranarray(np.ones((2, 3)) * rank), "deep": [{"k": rank}]}
    got = mpi_util.rank0_gather(mine, comm=comm)
    assert len(got) == (1 if rank else size)
    for k, one in enumerate(got):
        same(one["x"], np.full((40_000, 3), k or rank))
        same(one["f"], np.ones((2, 3)) * (k or rank))
        assert one["deep"] == [{"k": k or rank}]
        one["x"][0] = -1  # they may be changed, and nobody else sees it
    assert rank or (mine["x"] == 0).all()
    odd = (lambda: 0) if rank == size - 1 else 0
    raises(mpi_util.BatchError, "pickle", lambda: mpi_util.rank0_gather(odd, comm=comm))


def check_objects_by_index(comm, rank, size):
    numbers = [i for i in range(5 * size) if (i + i // size) % size == rank]
    trajectories = [{"obs": np.full(i % 3, i), "info": {"i": i}} for i in numbers]
    got = mpi_util.rank0_gather(trajectories, index=numbers, comm=comm)
    assert [t["info"]["i"] for t in got] == (numbers if rank else list(range(5 * size)))
    assert all((t["obs"] == t["info"]["i"]).all() for t in got)
    assert mpi_util.rank0_gather([], index=[], comm=comm) == []


def check_what_was_taken_is_the_index(comm, rank, size):
    numbers = mpi_util.deal(11, comm=comm)
    mine = [{"i": i} for i in numbers]
    got = mpi_util.rank0_accum_batches(mine, index=numbers.taken, comm=comm)
    assert rank or got["i"].tolist() == list(range(11))


def check_small_parts_of_objects_keep_no_memory(comm, rank, size):
    got = mpi_util.rank0_gather({"big": np.zeros(100_000), "small": np.zeros(2)}, comm=comm)
    assert rank or all(one["small"].base is None or one["small"].base.nbytes < 1000 for one in got)


def check_a_batch_that_is_no_list_has_no_index(comm, rank, size):
    for call in (mpi_util.rank0_accum_batches, mpi_util.all_accum_batches, mpi_util.rank0_gather):
        for batch in ({"x": 1}, 3):
            raises(mpi_util.BatchError, "give a list", lambda b=batch, c=call: c(b, index=[rank], comm=comm))


def check_lists_of_2017_are_joined_for_all(comm, rank, size):
    got = mpi_util.all_accum_batches({"obs": [np.full(2, rank)] * rank, "x": np.zeros((1, 3))}, comm=comm)
    assert [row.tolist() for row in got["obs"]] == [[k, k] for k in range(size) for _ in range(k)]
    assert got["x"].shape == (size, 3)
    if rank == 0:
        batches = [{"a": [1, "b"], "x": np.ones(2), "last": np.float64(3)}, {"a": [], "x": np.zeros(1), "last": 4.0}]
        joined = mpi_util.accum_batches(batches)
        assert joined.keys() == {"a", "x"} and joined["a"] == [1, "b"] and joined["x"].tolist() == [1, 1, 0]
    assert mpi_util.mpitype(np.float32).Get_size() == 4 and mpi_util.mpitype("i4") is None


def check_a_counter_is_a_dict(comm, rank, size):
    got = mpi_util.all_accum_batches({"acts": Counter(left=3)}, comm=comm)["acts"]
    assert type(got) is Counter and got["left"].tolist() == [3] * size


def check_results_stay_as_long_as_they_are_held(comm, rank, size):
    kept = []
    for iteration in range(6):
        x = np.full((1000 * (iteration + 1), 5), 10 * iteration + rank)
        got = mpi_util.rank0_accum_batches({"x": x, "y": x[:, 0]}, comm=comm)
        if rank == 0:
            kept.append(got["x"][3:7, 1:3] if iteration % 2 else got["y"])  # a view of a view keeps the memory too
            del got
            for i, part in enumerate(kept):
                assert (part % 10 < size).all() and (part // 10 == i).all(), i
            if iteration == 3:
                kept[0] = np.zeros(1, int)  # let go: its memory may be used again


run_checks(globals())
