"""What both learners do around their network: minibatches, updates that can be undone, sums, checkpoints."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from policies.backend import Array, Minibatch, Net, Params, as_array
from policies.data_parallel import ALONE, LearnerGroup, Part
from policies.hyper import Hyper

State = tuple[dict[str, Array], dict[str, float]]  # arrays and numbers of a checkpoint, by name
POLICY_STREAM, VALUE_STREAM = 0, 1


class Learner:
    """A network that learns from batches, alone or with others."""

    net: Net  # of whichever backend
    in_minibatches = False  # whether an update makes its steps on parts of the batch
    adaptive: tuple[str, ...] = ()  # names of the attributes that an update rule changes, all numbers

    def __init__(self, net: Net, group: LearnerGroup = ALONE):
        """Args: group: the learners that share the batch."""
        self.net, self.hyper, self.group = net, net.hyper, group
        self.updates = 0  # so far; selects the random stream of the next one
        self.lr_scale = 1.0  # factor of the step sizes, 0 to 1, set before an update

    def n_threads(self, n_rows: int) -> int:
        """Threads that an update's steps use, the same on each learner. Args: n_rows: rows of the whole batch."""
        n_steps = n_minibatches(self.hyper, n_rows) if self.in_minibatches else 1
        return self.net.n_threads(n_rows // n_steps // self.group.n_learners)

    def descend(self, rows: Any, minibatches: Iterable[Minibatch], lr: float) -> None:
        """A step of Adam along the gradient of each minibatch, of all learners. Args: lr: step size."""
        if self.net.descend and self.group.n_learners == 1:
            self.net.descend(rows, minibatches, lr)
        else:
            for minibatch, n in minibatches:
                self.net.step(self.summed(self.net.loss_gradient(rows, minibatch, n)), lr)

    def summed(self, vector: Any) -> Any:
        """A vector's sum over the learners. Args: vector: float32 (P,), overwritten. Returns: it, or an array."""
        if self.group.n_learners > 1:
            vector = as_array(vector)
            vector[...] = self.group.sum(vector)  # where an array begins may decide the last bits of products with it
        return vector

    def means(self, part: Part, sums: Iterable[float]) -> Array:
        """Means over the whole batch. Args: sums: over this learner's rows. Returns: float64 array, one for each."""
        return self.group.sum(np.array([*sums], np.float64)) / part.total

    def moments(self, part: Part, *arrays: Array) -> tuple[Array, Array]:
        """Means and standard deviations over the whole batch, float64, one for each array of float32 (len(part),)."""
        means = self.means(part, (x.sum(dtype=np.float64) for x in arrays))
        return means, np.sqrt(self.means(part, (np.square(x - mean).sum() for x, mean in zip(arrays, means))))

    def snapshot(self) -> tuple[list[Array], int]:
        """What an update changes of the network and the optimizer, for `restore`."""
        return [self.net.vector(which) for which in range(3)], self.net.steps

    def restore(self, before: tuple[list[Array], int]) -> None:
        """Undoes an update. Args: before: what `snapshot` returned before it."""
        vectors, self.net.steps = before
        for which, vector in enumerate(vectors):
            self.net.set_vector(vector, which)

    @contextmanager
    def updating(self, n_rows: int) -> Iterator[dict[str, float]]:
        """Context of one update of `n_rows` rows, with a fitting number of threads; undone if it fails.

        It gives a dict for what the update logs, whose numbers become Python floats. After any exception network and
        optimizer are as before; FloatingPointError: one of these or a parameter is not finite.
        """
        net, log = self.net, dict[str, float]()
        with net.using(self.n_threads(n_rows)), np.errstate(all="ignore"):
            before = self.snapshot()
            try:
                yield log
                log |= {key: float(value) for key, value in log.items()}
                if bad := [key for key, value in log.items() if not math.isfinite(value)]:
                    raise FloatingPointError(f"{bad[0]} is {log[bad[0]]} after the update")
                if not np.isfinite(net.vector().sum()):
                    raise FloatingPointError(f"the {net.name} update's loss or gradient is not finite")
            except BaseException:
                self.restore(before)
                raise
        self.updates += 1

    def state(self) -> State:
        """What later updates depend on: (arrays, numbers), by name, the same for every backend."""
        name, ((vector, m, v), steps) = self.net.name, self.snapshot()
        arrays = self.net.by_name(vector) | {f"{name}/adam/m": m, f"{name}/adam/v": v}
        adaptive = {f"{name}/{key}": getattr(self, key) for key in self.adaptive}
        return arrays, {f"{name}/adam/steps": steps, f"{name}/updates": self.updates} | adaptive

    def load_state(self, arrays: Params, scalars: Mapping[str, float]) -> None:
        """Restores what `state` returned; ignores other names. ValueError: it does not fit. KeyError: one missing."""
        name, net = self.net.name, self.net
        net.load(arrays)
        m, v, steps = arrays[f"{name}/adam/m"], arrays[f"{name}/adam/v"], scalars[f"{name}/adam/steps"]
        self.restore(([net.vector(), m, v], int(steps)))
        self.updates = int(scalars[f"{name}/updates"])
        for key in self.adaptive:
            setattr(self, key, scalars[f"{name}/{key}"])


def stream(seed: int, learner: int, update: int) -> np.random.Generator:
    """Random generator of an update's minibatches. Args: learner: POLICY_STREAM or VALUE_STREAM. update: its number."""
    return np.random.default_rng((seed, learner, update))


def n_minibatches(hyper: Hyper, n_rows: int) -> int:
    """Minibatches per pass, 1 to n_rows. Args: n_rows: rows of the whole batch."""
    return max(1, min(hyper.minibatches or round(n_rows / hyper.minibatch_rows), n_rows))


def shuffled(rng: np.random.Generator, part: Part, n_parts: int) -> Iterator[Minibatch]:
    """One pass over the whole batch in random order, in minibatches whose sizes differ by one at most.

    A single one is in the batch's own order, as that of a sum does not matter. Args: rng: the same for each learner.

    Returns: for each minibatch, int64 positions in `part` of its rows, and the number of rows of the whole minibatch.
    """
    if n_parts == 1:
        return iter([(np.arange(len(part)), part.total)])
    positions = np.full(part.total, -1)  # in this part, of each row of the whole batch; -1: not in it
    positions[part.rows] = np.arange(len(part))
    minibatches = np.array_split(positions[rng.permutation(part.total)], n_parts)
    return ((minibatch[minibatch >= 0], len(minibatch)) for minibatch in minibatches)
