"""Sends, averages and compares weights; `bcast` sends any object. In the process of each rank."""

import contextlib
import dis
import functools
import math
from collections.abc import Callable, Collection, Sequence
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar

import numpy as np

from ..arrays import tree
from ..arrays.adapters import modes, opened, sample, slots, unsent
from ..arrays.layout import ModelCopier, Slot
from ..errors import BatchError, WeightsError
from ..ranks import failure
from ..ranks.console import msg, print0_once, print_once
from ..ranks.identity import Comm
from ..ranks.state import state
from ..ranks.threads import Threads
from . import pickles
from .agreement import SECOND
from .channel import Channel, Kept, channel_of, paired, write_rows
from .gather import rank0_accum_batches
from .mismatch import check_same

T = TypeVar("T")

_SMALL = 1024  # numbers in an array that may be sent in place of an attribute


def rank0_bcast_wts(model: T, graph: Any = None, label: str = "", *, comm: Comm = None) -> T:
    """Collective: every rank's model gets rank 0's weights. A rank that does not call it is waited for.

    Everything moves as one block, whatever the number of arrays. The values are written in place, on the device where
    the model lives; rank 0's are only read. A model may change between calls, if in the same way on all ranks.

    Other attributes of a model (`self.epsilon = 0.1`, a tensor that is no buffer) are not sent. Rank 0 prints once
    which numbers, arrays and tensors among them differ between ranks; up to 2,048 elements of an array are compared.

    Args:
        model: torch module (parameters, buffers, and its mode of training or evaluation), torch optimizer (its state),
            Keras model (all weights) or optimizer, tf.Module, tf.compat.v1 session, module or optimizer of Flax's nnx
            (its modes too), tree of JAX arrays of any class that JAX knows, or a nested dict, list or tuple of such, of
            NumPy arrays, tensors, variables, numbers (not in a tuple) and plain objects; functions stay; same names,
            dtypes and shapes on every rank, but for the numbers in automatic layer names (`dense_3`). Of an object
            those attributes are sent that are numbers, arrays, tensors or models, or hold nothing but such (no lists
            of numbers: data), and all models.
        graph: of the session: all its global variables are sent (trainable ones, BatchNorm's statistics, optimizer
            state), and nothing is added to it; where the ranks' differ, because rank 0 alone has an optimizer, the
            trainable ones. None: the session's own; other models have none.
        label: accepted as in 2017, and not used.
        comm: communicator; None: all ranks.

    Returns:
        The model. Use what is returned: a tree with JAX arrays, which cannot be written, is a new one.

    Raises:
        RankMismatchError: on every rank, with the first name that differs, if the models differ.
        WeightsError: on every rank, if the model of one has no weights (yet), or what cannot be written.
    """
    return send("rank0_bcast_wts", channel_of(comm), Models(model, graph))


def all_avg_wts(model: T, graph: Any = None, label: str = "", *, comm: Comm = None) -> T:
    """Collective: every rank's model gets the mean of all ranks' weights, which is the same bits on every rank.

    Integers and booleans (step counters, masks) are not averaged: all get rank 0's. For normalisers: `merge_moments`.

    Args, Returns, Raises: as `rank0_bcast_wts`.
    """
    channel = channel_of(comm)
    own = Models(model, graph, only_all=True)
    _compare("all_avg_wts", channel, own)
    (copier,) = own.copiers
    found = [slot for _, slot in copier.pairs]
    stacked = rank0_accum_batches({slot.name: slot.to_numbers(slot.copy())[None] for slot in found}, comm=comm)
    if channel.rank == 0:
        for slot in found:
            numbers = stacked[slot.name]
            if numbers.dtype.kind in "fc":
                wide = np.result_type(numbers.dtype, np.float64)
                slot.write(slot.to_bits(np.asarray(numbers.mean(axis=0, dtype=wide), numbers.dtype)))
        copier.flush(copier.pairs)
    return send("all_avg_wts", channel, own)


def weights_version() -> int:
    """How often weights have been sent to all ranks. Not collective."""
    kept = state(Kept)
    return max(channel.version for channel in (kept.world, kept.alone, Channel) if channel)


def chksum(model: Any, graph: Any = None, label: str = "") -> str:
    """Sixteen hex digits that are equal for models with the same names, shapes and bits. Not collective.

    They cover what `rank0_bcast_wts` sends, and nothing else: no attribute that is neither parameter nor buffer.

    Args:
        model: and graph, as in `rank0_bcast_wts`.
        label: printed with the checksum, tagged with the rank, if it is not empty; it may take the place of `graph`.
    """
    if isinstance(graph, str):
        graph, label = None, graph
    copier = ModelCopier.of(slots((opened(model) or [model])[0], graph))
    total = tree.digest(copier.layout.signature, *(slot.copy().tobytes() for _, slot in copier.pairs)).hex()
    if label:
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

    def describe() -> list[tuple[Any, ...]]:
        if in_place and channel.rank and not array.flags.writeable:
            raise BatchError("bcast: the array of another rank than 0 is written in place, and this one is read-only")
        return [("x", array.dtype, array.shape)] if in_place else []

    def decide(described: list[Any]) -> Sequence[Any]:
        check_same("bcast", described)
        if not in_place:
            return [pickles.pack("bcast", [x])] * channel.size
        return channel.spread_sources(array.nbytes, lambda block: write_rows(block, [array], [0]))

    answer: Any = channel.agree("bcast", describe, decide)
    if not in_place:
        value: T = x
        if channel.rank:
            value = pickles.unpack(answer)[0]
        return value
    block = channel.spread("bcast", answer)
    if channel.rank:
        np.copyto(array, np.ndarray(array.shape, array.dtype, block))
    return x


def samples(model: Any) -> dict[str, str]:
    """Of each weight a text that differs where some of up to 2,048 elements do; {} of what cannot be sent now."""
    with contextlib.suppress(WeightsError, BatchError):
        return {slot.name: sample(slot.copy()) for slot in slots((opened(model) or [model])[0])}
    return {}


class Models(Generic[T]):
    """What a rank sends or gets: its model, with a copier for each choice of weights.

    The copiers are made when they are first asked for, within the agreement, so that an error reaches all ranks.
    """

    give: Callable[[], T]  # the model with what was written; the same object, or a new one
    new: Collection[str]  # the names of what is only in a new one

    def __init__(self, model: T, graph: Any = None, only_all: bool = False, in_place: bool = False):
        """Args: only_all: a session's trainable variables are no choice. in_place: a new tree would be lost."""
        self._model, self._graph, self._only_all, self._in_place = model, graph, only_all, in_place
        self.held: list[tuple[str, Any]] = []

    @functools.cached_property
    def copiers(self) -> list[ModelCopier]:
        """Of all weights; of a session with a graph also of the trainable variables."""
        model, self.give, self.new = opened(self._model) or (self._model, lambda: self._model, ())
        if self._in_place and self.new:
            wrong = "is not written in place; give an object that holds it, or call rank0_bcast_wts before"
            raise WeightsError(f"weights: a {type(self._model).__name__} with JAX arrays {wrong}")
        copiers = [_writable(slots(model, self._graph, held=self.held))]
        if self._graph is not None and not self._only_all:
            with contextlib.suppress(WeightsError):  # it has none
                copiers.append(_writable(slots(self._model, self._graph, trainable=True)))
        return copiers

    def choices(self, alone: bool) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        """A digest of what is not sent; and for each copier its signature, and the alignments of its arrays."""
        choices = [
            (copier.layout.signature, np.array([slot.alignment for _, slot in copier.pairs], np.int64).tobytes())
            for copier in self.copiers
        ]
        self.unsent = [] if alone else unsent(self.held)
        return tree.digest(self.unsent), choices


def send(op: str, channel: Channel, models: Models[T]) -> T:
    """Collective: all ranks get rank 0's values if their models are the same. Returns the model."""

    def decide(contributed: list[tuple[bytes, list[tuple[bytes, bytes]]]]) -> Sequence[Any]:
        digests, choices = zip(*contributed)
        ask = len({*digests}) > 1 and not state(Kept).told_unsent
        for i, of_ranks in enumerate(zip(*choices)):
            if len({signature for signature, _ in of_ranks}) == 1:
                copier = models.copiers[i]
                _note_alignment(copier, *(alignment for _, alignment in of_ranks[:2]))
                pools = state(Threads)
                pools.largest = max(pools.largest, *(math.prod(entry.shape) for entry in copier.layout.entries))
                sources = channel.spread_sources(copier.layout.nbytes, copier.read)
                of_parts = modes(models.held) if channel.size > 1 else {}
                return paired(sources, (i, channel.version + 1, ask, {key: of_parts[key][key[1]] for key in of_parts}))
        return [(None, (-1, 0, False, {}))] * channel.size

    source, (chosen, version, ask, given) = channel.agree(op, lambda: models.choices(channel.size == 1), decide)
    if chosen < 0:
        _compare(op, channel, models)  # raises the error that names the first array that differs
    block = channel.spread(op, source)
    if channel.rank:
        if channel.rank == 1 and models.new:
            _note_dropped(op, models, block, chosen)
        models.copiers[chosen].write(block)
        for (number, name), attributes in modes(models.held).items():
            attributes[name] = given.get((number, name), attributes[name])
    if ask:
        channel.agree(op + SECOND, lambda: models.unsent, functools.partial(_note_unsent, models.copiers[chosen]))
    channel.version = version
    return models.give()


def _note_dropped(op: str, models: Models[Any], block: Any, chosen: int) -> None:
    """Rank 1 prints, once, that the program makes nothing of the tree with other values that it gets."""
    frame: FrameType | None = failure.program_frame()
    after = ""
    while frame and (after := _after(frame.f_code, frame.f_lasti)) == "RETURN_VALUE":
        frame = frame.f_back  # what this function of the program's gives may be dropped
    new = (pair for pair in models.copiers[chosen].pairs if pair[0].name in models.new)
    dropped = frame and after in ("POP_TOP", "_")
    if dropped and any(slot.copy().tobytes() != entry.view(block, slot.dtype).tobytes() for entry, slot in new):
        fix = f"use what it returns: params = mpi_util.{op}(params)"
        print_once(f"mpi_util: {op}: JAX's arrays cannot be written, so the model here stays as it was; {fix}")


@functools.cache  # asked at each call
def _after(code: CodeType, call: int) -> str:
    """What the program does with what this call returns: the name of the next instruction, or of a variable `_`."""
    after = next(instruction for instruction in dis.get_instructions(code) if instruction.offset > call)
    return "_" if after.argval == "_" else after.opname


def _compare(op: str, channel: Channel, models: Models[T]) -> None:
    """Collective: raises RankMismatchError if the models differ."""

    def decide(kinds: list[list[Any]]) -> list[None]:
        last = min(map(len, kinds)) - 1
        check_same(op, [of_rank[last] for of_rank in kinds])
        return [None] * channel.size

    channel.agree(op + SECOND, lambda: [copier.layout.kinds for copier in models.copiers], decide)


def _writable(found: list[Slot]) -> ModelCopier:
    """The copier of slots that can all be written: on rank 0 too, so that it is the same on every rank."""
    for slot in found:
        if slot.unwritable:
            raise WeightsError(f"'{slot.name}' cannot be written in place: {slot.unwritable}")
    return ModelCopier.of(found)


def _note_alignment(copier: ModelCopier, rank_0s: bytes, rank_1s: bytes = b"") -> None:
    """Prints once which array has other strides or alignment on rank 1: products with it have other last bits."""
    if rank_1s and rank_0s != rank_1s:
        differ = np.frombuffer(rank_0s, np.int64) != np.frombuffer(rank_1s, np.int64)
        name = copier.layout.entries[int(np.flatnonzero(differ)[0])].name
        so = "so products with it may have other last bits; write new values into it: w[:] = ..., tensor.copy_(...)"
        print0_once(f"mpi_util: '{name}' has another layout or alignment in memory on rank 0 than on rank 1, {so}")


def _note_unsent(copier: ModelCopier, of_ranks: list[list[tuple[str, str]]]) -> list[None]:
    """Prints, once, which attributes that all ranks' models have differ between them, if their values are not sent."""
    small = [slot.copy() for _, slot in copier.pairs if math.prod(slot.shape) <= _SMALL]
    sent = {text for array in small for text in (sample(array), repr(array.tolist()))}
    first, *others = map(dict, of_ranks)
    differ = (name for name, text in first.items() if any(other.get(name, text) != text for other in others))
    if names := [name for name in differ if first[name] not in sent]:
        state(Kept).told_unsent = True
        fix = 'make it a buffer or nnx.Variable, send it too, [model, {"epsilon": ...}], or set it on all ranks'
        what = f"mpi_util: '{', '.join(names[:5])}' of the model differs between ranks and is not sent"
        failure.print_line(f"{what}; if the policy uses it {fix}")
    return [None] * len(of_ranks)
