"""Which rank learns from which rows: all of them on rank 0, or each rank from its own, with sums over the ranks."""

from typing import Any, NamedTuple

import numpy as np

import mpi_util
from policies.actor import Spec
from policies.share import Part, Share
from trainer.collect import Collected
from trainer.rollout import empty_batch


class Pooled(NamedTuple):
    """An iteration's steps, as one rank has them."""

    batch: dict[str, np.ndarray] | None  # what it learns from; None: it only collects, or the run was stopped
    part: Part  # which rows of the whole batch these are
    work: np.ndarray  # float64 (4,), as in Runner's batches, summed over all ranks; zeros without a batch


NOTHING = Pooled(None, Part.whole(0), np.zeros(4))


def gather(collected: Collected, spec: Spec, stop: mpi_util.StopRequest) -> Pooled:
    """Collective: all ranks' batches on rank 0, in the order of their places; NOTHING elsewhere."""
    batch = mpi_util.rank0_accum_batches(collected.batches, index=collected.places)
    if mpi_util.rank or stop:
        return NOTHING
    return Pooled(batch, Part.whole(len(batch["obs"])), batch["work"].sum(axis=0))


def keep_own(collected: Collected, spec: Spec, stop: mpi_util.StopRequest) -> Pooled:
    """Collective: each rank keeps its own rows, and learns their numbers in the batch that `gather` would make."""
    if mpi_util.all_sum(bool(stop)):
        return NOTHING
    batches, places = collected
    sizes: Any = [{"rows": len(b["obs"]), "rank": mpi_util.rank, "work": b["work"]} for b in batches]
    sizes = mpi_util.all_accum_batches(sizes, index=places)
    ends = np.cumsum(sizes["rows"])
    own = [np.arange(end - n, end) for end, n, k in zip(ends, sizes["rows"], sizes["rank"]) if k == mpi_util.rank]
    in_order = [batches[i] for i in np.argsort(places)] or [empty_batch(spec)]
    batch = {key: np.concatenate([b[key] for b in in_order]) for key in in_order[0]}
    return Pooled(batch, Part(np.concatenate([*own, np.empty(0, int)]), int(ends[-1])), sizes["work"].sum(axis=0))


class Ranks(Share):
    """One learner on each rank."""

    def __init__(self) -> None:
        self.n_learners, self.index = mpi_util.nworkers, mpi_util.rank

    def sum(self, x: np.ndarray) -> np.ndarray:
        """Collective: `x` becomes its sum over the ranks."""
        x[...] = mpi_util.all_sum(x)
        return x
