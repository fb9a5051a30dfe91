"""Adds up the arrays of all ranks, such as gradients at every optimizer step; in the process of each rank.

The ranks of one machine write theirs into a page of memory that they share, on which rank 0 adds them up within the
agreement. Where they share none, small ones go along with the agreement, and large ones through rank 0.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..host.segments import align, private
from .mismatch import check_same

if TYPE_CHECKING:
    from .channel import Channel
    from .reduce import Description, Reduction

_ALONG, _TOGETHER = 1 << 18, 1 << 20  # bytes of a rank, of all, that go along with an agreement
_SPARE = 1.25


class Page:
    """One rank's view of it. No rank writes its row, or rank 0 the total, before all have read the last total."""

    def __init__(self, memory: Any, n: int, room: int, serial: int):
        """Args: n: number of ranks. room: bytes of an array. serial: a number that tells pages apart."""
        self.room, self.serial = room, serial
        *self.rows, self.total = np.frombuffer(memory, np.uint8)[: (n + 1) * room].reshape(-1, room)


def add_up(channel: "Channel", reduction: "Reduction") -> np.ndarray:
    """Collective: all ranks' arrays, added up in rank order, in the reduction's layout; valid until the next call."""
    page = channel.page

    def contribute() -> tuple["Description", int]:
        description = reduction.description
        if page is None or reduction.layout.nbytes > page.room:
            return description, 0
        reduction.write(page.rows[channel.rank])
        return description, page.serial

    def decide(contributed: Sequence[tuple["Description", int]]) -> list[Any]:
        """For each rank None: the total is on the page; or where a new page is, if there is memory, and its size."""
        check_same(reduction.op, [description for description, _ in contributed])
        serials = {serial for _, serial in contributed}
        if page and serials == {page.serial}:
            reduction.combine(page.rows, page.total)
            return [None] * channel.size
        room = align(int(reduction.layout.nbytes * _SPARE))
        memory, address = channel.lease((channel.size + 1) * room, channel.below)
        new = (memory if address else None, room, channel.messages.calls)
        return [new, *[(address, *new[1:])] * (channel.size - 1)]

    answer = channel.agree(reduction.op, contribute, decide)
    if answer is None and page:
        return page.total
    memory, room, serial = answer
    if memory is None:
        total = add_in_agreement(channel, reduction)
        return add_through_rank_0(channel, reduction) if total is None else total
    channel.page = Page(channel.pool.map(memory) if channel.rank else memory, channel.size, room, serial)
    return add_up(channel, reduction)


def add_in_agreement(channel: "Channel", reduction: "Reduction") -> np.ndarray | None:
    """Collective: small rows go along with the agreement, in which rank 0 combines them. None: they are too large."""

    def contribute() -> tuple[Any, np.ndarray | None]:
        description = reduction.description
        if (nbytes := reduction.layout.nbytes) > min(_ALONG, _TOGETHER // channel.size):
            return description, None
        reduction.write(row := private(nbytes))
        return description, row

    def decide(contributed: list[tuple[Any, np.ndarray | None]]) -> Sequence[np.ndarray | None]:
        check_same(reduction.op, [description for description, _ in contributed])
        rows = [row for _, row in contributed if row is not None]
        if not rows:
            return [None] * channel.size
        reduction.combine(rows, total := private(reduction.layout.nbytes))
        return [total] * channel.size

    return channel.agree(reduction.op, contribute, decide)


def add_through_rank_0(channel: "Channel", reduction: "Reduction") -> np.ndarray:
    """Collective: large rows, which agree, all come to rank 0, and their combination to all ranks."""
    own = private(nbytes := reduction.layout.nbytes)

    def targets(_: list[None]) -> Sequence[Any]:
        return channel.collect_targets(channel.size * nbytes, [[(k * nbytes, nbytes)] for k in range(channel.size)])

    target = channel.agree(reduction.op, lambda: reduction.write(own), targets)
    channel.collect(reduction.op, target, [own])

    def sources(_: list[None]) -> Sequence[Any]:
        rows = target.block.reshape(channel.size, -1)
        return channel.spread_sources(nbytes, lambda block: reduction.combine(rows, block))

    return channel.spread(reduction.op, channel.agree(reduction.op, lambda: None, sources))
