"""Sends, averages and compares the weights of anything that has weights; `bcast` sends any object."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from ..arrays import tree
from ..arrays.adapters import slots
from ..arrays.layout import Plan, Slot, derived
from ..errors import BatchError, RankMismatchError, WeightsError, rank_mismatch
from ..ranks import failure
from ..ranks.identity import Comm, rank
from ..ranks.state import process
from .barrier import DIFFERS, SMALL, Exchange, Page, possible
from .channel import Channel, channel_of
from .gather import rank0_accum_batches
from .transport import broadcast

T = TypeVar("T")


def rank0_bcast_wts(model: Any, graph: Any = None, label: str = "", *, comm: Comm = None) -> int:
    """Collective: every rank's model gets rank 0's weights. A rank that does not call it is waited for.

    Everything moves as one block, whatever the number of arrays. The values are written in place, on the device where
    the model lives; rank 0's are only read. A model may change between calls, if it changes in the same way on all
    ranks.

    Args:
        model: torch module (parameters and buffers), torch optimizer (its state), Keras model (all weights, BatchNorm's
            statistics too) or optimizer, tf.Module, tf.compat.v1 session, or a nested dict/list/tuple of NumPy arrays,
            tensors and variables; the same names, dtypes and shapes on every rank. The numbers in automatic layer names
            (`dense_3`) do not matter.
        graph: of the session: all its global variables are sent (trainable ones, BatchNorm's statistics, optimizer
            state), and nothing is added to it; where the ranks' differ, because rank 0 alone has an optimizer, the
            trainable ones. None: the session's own; other models have none.
        label: accepted as in 2017, and not used.
        comm: communicator; None: all ranks.

    Returns:
        The version of these weights, on every rank: 1 for the first broadcast on this communicator, then 2, ...

    Raises:
        RankMismatchError: on every rank, with the first name that differs, if the models differ.
        WeightsError: on every rank, if the model of one has no weights (yet), or none that can be written in place.
    """
    channel = channel_of(comm)
    try:
        channel.version = _Model("rank0_bcast_wts", model, graph).send(channel)
    except RankMismatchError as error:  # on every rank
        if graph is None or DIFFERS not in str(error):
            raise
        channel.version = _Model("rank0_bcast_wts", model, graph, trainable=True).send(channel)
    return channel.version


def all_avg_wts(model: Any, graph: Any = None, label: str = "", *, comm: Comm = None) -> None:
    """Collective: every rank's model gets the mean of all ranks' weights, which is the same bits on every rank.

    Integers and booleans (step counters, masks) are not averaged: all get rank 0's.

    Args, Raises: as `rank0_bcast_wts`.
    """
    channel = channel_of(comm)
    own = _Model("all_avg_wts", model, graph)
    own.exchange(channel)
    found = [slot for _, slot in own.plan.pairs][1:]  # without the places
    stacked = rank0_accum_batches({slot.name: slot.numbers()[None] for slot in found}, comm=comm)
    if channel.rank == 0:
        for slot in found:
            numbers = stacked[slot.name]
            if numbers.dtype.kind in "fc":
                wide = np.result_type(numbers.dtype, np.float64)
                slot.write(slot.bits(np.asarray(numbers.mean(axis=0, dtype=wide), numbers.dtype)))
        own.plan.flush()
    own.send(channel)


def chksum(model: Any, graph: Any = None, label: str = "") -> str:
    """Sixteen hex digits that are equal for models with the same names, shapes and bits. Not collective.

    Args:
        model: as in `rank0_bcast_wts`.
        graph: likewise.
        label: printed with the checksum, tagged with the rank, if it is not empty; it may take the place of `graph`.
    """
    if isinstance(graph, str):
        graph, label = None, graph
    plan = derived(slots(model, graph), Plan.of)
    total = tree.digest(plan.layout.signature, *(slot.copy().tobytes() for _, slot in plan.pairs)).hex()
    if label:
        from ..ranks.console import msg

        msg(f"{label} chksum {total}")
    return total


def bcast(x: T, *, comm: Comm = None) -> T:
    """Collective: rank 0's `x` on every rank.

    Args:
        x: an array is overwritten in place on the other ranks, where it must have rank 0's dtype and shape; anything
            else that can be pickled, an array of objects too, is returned as a copy of rank 0's.
        comm: communicator; None: all ranks.

    Returns:
        Rank 0's value; for an array, `x` itself.

    Raises:
        RankMismatchError: on every rank, if an array's dtype or shape differs. BatchError: x cannot be pickled.
    """
    channel = channel_of(comm)
    array: Any = x
    in_place = isinstance(x, np.ndarray) and not x.dtype.hasobject and not isinstance(x, np.ma.MaskedArray)

    def describe() -> tuple[Any, ...] | None:
        if in_place and channel.rank and not array.flags.writeable:
            raise BatchError("bcast: the array of another rank than 0 is written in place, and this one is read-only")
        return (array.dtype, array.shape) if in_place else None

    def decide(described: list[Any]) -> tuple[int, Any]:
        all_same("bcast", described)
        return (array.nbytes, None) if in_place else (0, x)

    def write(block: np.ndarray) -> Iterator[int]:
        np.copyto(np.ndarray(array.shape, array.dtype, block), array)
        yield array.nbytes

    def take(block: np.ndarray, wait_for: Callable[[int], None]) -> None:
        wait_for(array.nbytes)
        np.copyto(array, np.ndarray(array.shape, array.dtype, block))

    value: T = broadcast(channel, "bcast", describe, decide, write, take)
    return x if in_place or channel.rank == 0 else value


def all_same(op: str, found: list[Any]) -> None:
    if any(f != found[0] for f in found):
        table = [f"{f[0]} {f[1]}" if f else "no array" for f in found]
        raise rank_mismatch(f"{op}: dtype and shape must be the same on every rank", table)


def _writable(found: list[Slot]) -> Plan:
    """The plan of slots that can all be written: on rank 0 too, so that it is the same on every rank."""
    for slot in found:
        if slot.fixed:
            raise WeightsError(f"'{slot.name}' cannot be written in place: {slot.fixed}")
    return Plan.of([_places(found), *found])  # first, as readers follow the writer closely


def _places(found: list[Slot]) -> Slot:
    """One more slot, by which rank 1 sees whether its arrays lie in memory as rank 0's do; it prints which does not.

    A vector instruction may begin elsewhere in an array with other strides, or at another alignment; then the same
    product with the same values has other last bits.
    """
    own = np.array([slot.place for slot in found], np.int64)

    def compare(rank_0s: np.ndarray) -> None:
        if rank() == 1 and not np.array_equal(own, rank_0s) and not process.of(_Noted):
            name = found[int(np.flatnonzero(own != rank_0s)[0])].name
            process.of(_Noted).append(name)
            failure.print_line(
                f"mpi_util: '{name}' has another layout or alignment in memory on rank 0 than on rank 1, so products "
                "with it may have other last bits; write new values into it: w[:] = ..., tensor.copy_(...)"
            )

    return Slot("(places)", own.dtype, own.shape, None, lambda out: np.copyto(out, own), compare)


class _Noted(list[str]):
    """The array whose place differs, once that was printed."""


class _Model(Exchange):
    """A model to send. Its weights are looked up within the agreement, so that an error there reaches all ranks.

    The exchange compares the models on the barrier page, and sends what is small there.
    """

    def __init__(self, op: str, model: Any, graph: Any, trainable: bool = False):
        self.op, self._model, self._graph, self._trainable = op, model, graph, trainable

    @functools.cached_property
    def plan(self) -> Plan:
        """How the weights are written and taken."""
        return derived(slots(self._model, self._graph, trainable=self._trainable), _writable)

    @property
    def _small(self) -> bool:
        return self.plan.layout.nbytes <= SMALL

    def describe(self) -> tuple[bytes, int, Any]:
        layout = self.plan.layout
        return tree.digest(self.op, layout.signature), 0, layout.kinds[1:]  # without the places

    def write(self, page: Page) -> None:
        if page.rank == 0 and self._small:
            self.plan.write_all(page.small(ahead=1)[0])

    def send(self, channel: Channel) -> int:
        """Collective: all ranks get rank 0's values if their models are the same. Returns the version."""
        if possible(channel):
            page = self.exchange(channel)
            if page is not None and self._small:
                if channel.rank:
                    self.plan.take(page.small()[0])
                return channel.version + 1

        def decide(signatures: list[bytes]) -> tuple[int, int]:
            return (self.plan.layout.nbytes, channel.version + 1) if len(set(signatures)) == 1 else (0, 0)

        version: int = broadcast(
            channel,
            self.op,
            lambda: self.plan.layout.signature,
            decide,
            lambda block: self.plan.write(block),
            lambda block, wait_for: self.plan.take(block, wait_for),
        )
        if not version:
            self.exchange(channel)  # raises the error that names the first array that differs
        return version
