"""Sends, averages and compares the weights of anything that has weights."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from . import tree
from .adapters import Slot, slots
from .channel import Channel
from .comm import channel_of
from .errors import RankMismatchError
from .gather import rank0_accum_batches
from .shared import align
from .transport import spread

_PART_BYTES = 1 << 20


def rank0_bcast_wts(model: Any, *, comm: Any = None) -> int:
    """Collective: every rank's model gets rank 0's weights. A rank that does not call it is waited for.

    Everything moves as one block, whatever the number of arrays. The values are written in place, on the device where
    the model lives; rank 0's are only read. A model may be changed between calls, if it is changed alike on all ranks.

    Args:
        model: torch module (parameters and buffers), torch optimizer (its state), or a nested dict/list/tuple of NumPy
            arrays and tensors; the same names, dtypes and shapes on every rank.
        comm: communicator; None: all ranks.

    Returns:
        The version of these weights, on every rank: 1 for the first broadcast on this communicator, then 2, ...

    Raises:
        RankMismatchError: on every rank, with the first name that differs, if the models differ.
        WeightsError: the model has nothing that can be written in place.
    """
    channel = channel_of(comm)
    channel.version = _agree_and_send(channel, "rank0_bcast_wts", lambda: _Block(model))
    return channel.version


def all_avg_wts(model: Any, *, comm: Any = None) -> None:
    """Collective: every rank's model gets the mean of all ranks' weights, which is the same bits on every rank.

    Integers and booleans (step counters, masks) are not averaged: all get rank 0's.

    Args, Raises: as `rank0_bcast_wts`.
    """
    channel = channel_of(comm)
    block: _Block | None = None

    def build() -> _Block:
        nonlocal block
        block = block or _Block(model)
        return block

    _agree_and_send(channel, "all_avg_wts", build, send=False)
    own = {slot.name: slot.number(values)[None] for slot, values in zip(block.slots, block.read_all())}
    stacked = rank0_accum_batches(own, comm=comm)
    if channel.rank == 0:
        for slot in block.slots:
            numbers = stacked[slot.name]
            if numbers.dtype.kind in "fc":
                wide = np.result_type(numbers.dtype, np.float64)
                slot.write(slot.bits(numbers.mean(axis=0, dtype=wide).astype(numbers.dtype)))
    _agree_and_send(channel, "all_avg_wts", build)


def chksum(model: Any, label: str = "") -> str:
    """Sixteen hex digits that are equal for models with the same names, shapes and bits. Not collective.

    Args:
        model: as in `rank0_bcast_wts`.
        label: printed with the checksum, tagged with the rank, if it is not empty.
    """
    block = _Block(model)
    total = tree.digest(block.signature, *(values.tobytes() for values in block.read_all())).hex()
    if label:
        from .console import msg

        msg(f"{label} chksum {total}")
    return total


class _Block:
    """The weights of a model as one block of bytes, each array at an aligned place."""

    def __init__(self, model: Any):
        self.slots: list[Slot] = slots(model)
        self.names = [(slot.name, slot.dtype.str, slot.shape) for slot in self.slots]
        self.signature = tree.digest(self.names)
        self.starts, self.nbytes = [], 0
        for slot in self.slots:
            self.starts.append(self.nbytes)
            self.nbytes += align(slot.dtype.itemsize * math.prod(slot.shape))

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

    def read_all(self) -> list[np.ndarray]:
        """A copy of each array."""
        copies = [np.empty(slot.shape, slot.dtype) for slot in self.slots]
        for slot, copy in zip(self.slots, copies):
            slot.read(copy)
        return copies


def _parts(flat: np.ndarray) -> list[slice]:
    """A flat array in parts, so that a receiver can copy one while the sender copies the next."""
    step = max(1, _PART_BYTES // max(1, flat.itemsize))
    return [slice(i, min(i + step, flat.size)) for i in range(0, flat.size, step)]


def _agree_and_send(channel: Channel, op: str, build: Callable[[], _Block], send: bool = True) -> int:
    """Agrees that the models are alike and, if `send`, gives everybody rank 0's values. Returns the version."""
    block: _Block | None = None

    def bring() -> bytes:
        nonlocal block
        block = build()
        return block.signature

    def check(signatures: list) -> tuple[int, Any]:
        if any(signature != block.signature for signature in signatures):
            return 0, None  # ask for the names
        return block.nbytes if send else 0, channel.version + 1

    version = spread(
        channel, op, bring, check, lambda memory: block.fill(memory), lambda memory, wait: block.take(memory, wait)
    )
    if version is None:
        channel.agree(op, lambda: block.names, lambda models: _raise_difference(op, models))
    return version


def _raise_difference(op: str, models: list) -> None:
    """Raises the RankMismatchError that names the first array that is not alike on all ranks."""
    reference = dict.fromkeys(models[0])
    k, other = next((k, other) for k, other in enumerate(models) if other != models[0])
    different = [*(a for a in other if a not in reference), *(a for a in models[0] if a not in other)]
    name = different[0][0] if different else other[0][0]
    table = []
    for j, names in enumerate(models):
        found = next((f"{dtype} {shape}" for n, dtype, shape in names if n == name), "missing")
        table.append(f"  rank {j}: {found} (of {len(names)} arrays)")
    raise RankMismatchError(
        f"{op}: the models differ, first at '{name}' (rank 0 and rank {k}); build the same model on every rank:\n"
        + "\n".join(table)
    )
