"""Sends, averages and compares the weights of anything that has weights."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..arrays import tree
from ..arrays.adapters import KeptSlots, Slot, slots
from ..errors import rank_mismatch
from ..host.segments import align
from ..launch.identity import Comm
from . import barrier as board
from .channel import Channel
from .comm import channel_of
from .gather import rank0_accum_batches
from .transport import spread

_PART_BYTES = 1 << 20
_DIFFERENT = -1  # in place of a version

_Names = list[tuple[str, str, tuple[int, ...]]]  # name, dtype and shape of each array


def rank0_bcast_wts(model: Any, graph: Any = None, label: str = "", *, comm: Comm = None) -> int:
    """Collective: every rank's model gets rank 0's weights. A rank that does not call it is waited for.

    Everything moves as one block, whatever the number of arrays. The values are written in place, on the device where
    the model lives; rank 0's are only read. A model may be changed between calls, if it is changed alike on all ranks.

    Args:
        model: torch module (parameters and buffers), torch optimizer (its state), Keras model (all weights, BatchNorm's
            statistics too) or optimizer, tf.Module, tf.compat.v1 session, or a nested dict/list/tuple of NumPy arrays,
            tensors and variables; the same names, dtypes and shapes on every rank. What layers were numbered by
            (`dense_3`) does not matter.
        graph: of the session: all its global variables are sent (trainable ones, BatchNorm's statistics, optimizer
            state), and nothing is added to it. None: the session's own; other models have none.
        label: taken as in 2017, and not used.
        comm: communicator; None: all ranks.

    Returns:
        The version of these weights, on every rank: 1 for the first broadcast on this communicator, then 2, ...

    Raises:
        RankMismatchError: on every rank, with the first name that differs, if the models differ.
        WeightsError: on every rank, if the model of one has no weights (yet), or none that can be written in place.
    """
    channel = channel_of(comm)
    channel.version = _agree_and_send(channel, "rank0_bcast_wts", lambda: _block_of(model, graph))
    return channel.version


def all_avg_wts(model: Any, graph: Any = None, label: str = "", *, comm: Comm = None) -> None:
    """Collective: every rank's model gets the mean of all ranks' weights, which is the same bits on every rank.

    Integers and booleans (step counters, masks) are not averaged: all get rank 0's.

    Args, Raises: as `rank0_bcast_wts`.
    """
    channel = channel_of(comm)
    build = functools.cache(lambda: _block_of(model, graph))
    _agree_and_send(channel, "all_avg_wts", build, send=False)
    block = build()
    own = {slot.name: slot.number(values)[None] for slot, values in zip(block.slots, block.read_all())}
    stacked = rank0_accum_batches(own, comm=comm)
    if channel.rank == 0:
        for slot in block.slots:
            numbers = stacked[slot.name]
            if numbers.dtype.kind in "fc":
                wide = np.result_type(numbers.dtype, np.float64)
                slot.write(slot.bits(numbers.mean(axis=0, dtype=wide).astype(numbers.dtype)))
        block.flush()
    _agree_and_send(channel, "all_avg_wts", build)


def chksum(model: Any, graph: Any = None, label: str = "") -> str:
    """Sixteen hex digits that are equal for models with the same names, shapes and bits. Not collective.

    Args:
        model, graph: as in `rank0_bcast_wts`.
        label: printed with the checksum, tagged with the rank, if it is not empty; it may take the place of `graph`.
    """
    if isinstance(graph, str):
        graph, label = None, graph
    block = _block_of(model, graph)
    total = tree.digest(block.signature, *(values.tobytes() for values in block.read_all())).hex()
    if label:
        from ..program.console import msg

        msg(f"{label} chksum {total}")
    return total


class _Block:
    """The weights of a model as one block of bytes, each array at an aligned place."""

    def __init__(self, found: list[Slot]):
        self.slots = found
        self.names: _Names = [(slot.name, slot.dtype.str, slot.shape) for slot in self.slots]
        self.signature = tree.digest(self.names)
        self.starts, self.nbytes = [], 0
        for slot in self.slots:
            self.starts.append(self.nbytes)
            self.nbytes += align(slot.dtype.itemsize * math.prod(slot.shape))

    def places(self, memory: np.ndarray) -> list[np.ndarray]:
        """Where the slots' arrays are in `memory`: flat for those that lie in one piece of host memory."""
        shapes = (slot.shape if slot.host is None else slot.host.shape for slot in self.slots)
        pieces = zip(shapes, self.slots, self.starts)
        return [np.ndarray(shape, slot.dtype, memory, start) for shape, slot, start in pieces]

    def lay(self, memory: np.ndarray) -> None:
        """Writes the model's values into `memory`, in one go."""
        for slot, place in zip(self.slots, self.places(memory)):
            if slot.host is None:
                slot.read(place)
            else:
                np.copyto(place, slot.host)

    def pick_up(self, memory: np.ndarray) -> None:
        """Sets the model's values from `memory`, in one go."""
        for slot, place in zip(self.slots, self.places(memory)):
            if slot.host is None:
                slot.write(place)
            else:
                np.copyto(slot.host, place)
        self.flush()

    def fill(self, block: np.ndarray) -> Iterator[int]:
        """Writes the model's values into `block`; yields the number of bytes that are there."""
        for slot, start in zip(self.slots, self.starts):
            if slot.host is None:
                slot.read(np.ndarray(slot.shape, slot.dtype, block, start))
            else:
                place = np.ndarray(slot.host.shape, slot.dtype, block, start)
                for part in _parts(slot.host):
                    place[part] = slot.host[part]
                    yield start + part.stop * slot.dtype.itemsize
            yield start

    def take(self, block: np.ndarray, wait_for: Callable[[int], None]) -> None:
        """Sets the model's values from `block`, as far as `wait_for` lets it."""
        for slot, start in zip(self.slots, self.starts):
            end = start + slot.dtype.itemsize * math.prod(slot.shape)
            if slot.host is None:
                wait_for(end)
                slot.write(np.ndarray(slot.shape, slot.dtype, block, start))
                continue
            place = np.ndarray(slot.host.shape, slot.dtype, block, start)
            for part in _parts(slot.host):
                wait_for(start + part.stop * slot.dtype.itemsize)
                slot.host[part] = place[part]
        self.flush()

    def flush(self) -> None:
        """Makes what slots have been written to the model's values, where they are not so at once."""
        for flush in {slot.flush for slot in self.slots if slot.flush}:
            flush()

    def read_all(self) -> list[np.ndarray]:
        """A copy of each array."""
        copies = [np.empty(slot.shape, slot.dtype) for slot in self.slots]
        for slot, copy in zip(self.slots, copies):
            slot.read(copy)
        return copies


def _block_of(model: Any, graph: Any) -> _Block:
    found = slots(model, graph)
    if not isinstance(found, KeptSlots):
        return _Block(found)
    block: _Block = found.block or _Block(found)
    found.block = block
    return block


def _parts(flat: np.ndarray) -> list[slice]:
    """A flat array in parts, so that a receiver can copy one while the sender copies the next."""
    step = max(1, _PART_BYTES // max(1, flat.itemsize))
    return [slice(i, min(i + step, flat.size)) for i in range(0, flat.size, step)]


def _agree_and_send(channel: Channel, op: str, build: Callable[[], _Block], send: bool = True) -> int:
    """Agrees that the models are alike and, if `send`, gives everybody rank 0's values. Returns the version."""
    block = functools.cache(build)  # what it raises is raised within the agreement
    if board.possible(channel) and _send_on_board(channel, op, block, send):
        return channel.version + 1

    def check(signatures: list[bytes]) -> tuple[int, int]:
        if any(signature != block().signature for signature in signatures):
            return 0, _DIFFERENT  # ask for the names
        return block().nbytes if send else 0, channel.version + 1

    version = spread(
        channel,
        op,
        lambda: block().signature,
        check,
        lambda memory: block().fill(memory),
        lambda memory, wait: block().take(memory, wait),
    )
    if version == _DIFFERENT:
        channel.agree(op, lambda: block().names, lambda models: _check_alike(op, models))
    return version


def _send_on_board(channel: Channel, op: str, block: Callable[[], _Block], send: bool) -> bool:
    """Agrees on the board, and sends what is small there. False if there is no board, or still something to be sent."""

    def describe() -> tuple[bytes, int, Any]:
        return tree.digest(op, block().signature), 0, block().names

    def lay(there: board.Board) -> None:
        if send and channel.rank == 0 and block().nbytes <= board.SMALL:
            block().lay(there.next_small[0])

    there = board.gather_round(channel, op, describe, lay, lambda models: _check_alike(op, models))
    if there is None or (send and block().nbytes > board.SMALL):
        return False
    if send and channel.rank:
        block().pick_up(there.last_small[0])
    return True


def _check_alike(op: str, models: Sequence[_Names]) -> Sequence[None]:
    """Raises the RankMismatchError that names the first array that is not alike on all ranks, if there is one."""
    reference = dict.fromkeys(models[0])
    k, other = next(((k, other) for k, other in enumerate(models) if other != models[0]), (0, None))
    if other is None:
        return [None] * len(models)
    different = [*(a for a in other if a not in reference), *(a for a in models[0] if a not in other)]
    name = different[0][0] if different else other[0][0]
    table = []
    for names in models:
        found = next((f"{dtype} {shape}" for n, dtype, shape in names if n == name), "missing")
        table.append(f"{found} (of {len(names)} arrays)")
    raise rank_mismatch(
        f"{op}: the models differ, first at '{name}' (rank 0 and rank {k}); build the same model on every rank", table
    )
