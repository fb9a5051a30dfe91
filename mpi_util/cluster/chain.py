"""Adds up large arrays of ranks that share no memory, or not all, in rank order: the bits are those of one machine.

The ranks of a machine bring their arrays to its leader. The sum goes from machine to machine in small parts; each
leader adds its ranks' arrays and sends it on. The results come back the other way meanwhile, so a link carries every
byte once in each direction, however many ranks there are.
"""

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays.layout import Layout
from ..collectives.channel import Channel
from ..collectives.gather_transfer import WRITTEN, Abandoned, send_pieces, wait_for_writers
from ..collectives.transport import bulk_tag, lease, wait_for_all
from ..host.segments import align, private
from ..ranks.state import process

_PART_BYTES = 1 << 18  # small, as the last machine waits for one part from each before it
_AHEAD = 8  # parts that are awaited at once

Add = Callable[[np.ndarray, np.ndarray, np.ndarray], object]  # of two arrays, into the third
Finish = Callable[[np.ndarray, np.ndarray], object]  # of the sum, into the second array


def add_up(
    channel: Channel, op: str, layout: Layout, write: Callable[[np.ndarray], None], add: Add, finish: Finish
) -> np.ndarray:
    """Collective, after all have agreed: what the arrays of all ranks add up to, as a block of `layout`, on every rank.

    Args:
        op: name of the collective call.
        layout: packed.
        write: writes this rank's arrays into such a block.
    """
    size = align(layout.nbytes)
    try:
        if channel.rank != channel.leader:
            return _bring(channel, op, size, write)
        return _lead(channel, op, layout, write, add, finish)
    except Exception as error:
        channel.messages.fail(op, error, range(channel.size), waiting=channel.members)
        raise


def _bring(channel: Channel, op: str, size: int, write: Callable[[np.ndarray], None]) -> np.ndarray:
    """A rank that is not a leader."""
    ticket, live = channel.messages.receive(channel.leader, op)
    place = channel.here().index(channel.rank) * size
    block = np.frombuffer(channel.attached.map(ticket, live), np.uint8) if ticket else private(size)
    write(block[place : place + size] if ticket else block)
    if ticket is None:
        send_pieces(channel, [block], [place])
    channel.messages.send(channel.leader, WRITTEN)
    result: np.ndarray | None = channel.messages.receive(channel.leader, op)
    return block[len(channel.here()) * size :] if result is None else result


def _lead(
    channel: Channel, op: str, layout: Layout, write: Callable[[np.ndarray], None], add: Add, finish: Finish
) -> np.ndarray:
    size, here = align(layout.nbytes), channel.here()
    block, ticket = lease(channel, (len(here) + 1) * size)
    for k in channel.members:
        channel.messages.send(k, (ticket, channel.pool.live))
    *rows, result = block.reshape(len(here) + 1, size)
    chain = None
    try:
        write(rows[0])
        wait_for_writers(channel, block, channel.members, op)
        chain = _Chain(channel, {k: _parts(layout, row) for k, row in zip(here, rows)}, _parts(layout, result))
        chain.run(add, finish)
    except BaseException:
        process.of(Abandoned).append((block, chain))
        raise
    for k in channel.members:
        channel.messages.send(k, None if ticket else result)
    return result


def _parts(layout: Layout, row: np.ndarray) -> list[np.ndarray]:
    """The arrays of a row, in which those of one dtype are one, in parts."""
    found = []
    for run in layout.runs(row):
        step = max(1, _PART_BYTES // run.itemsize)
        found += [run[start : start + step] for start in range(0, len(run), step)]
    return found


class _Chain:
    """A leader's place in it."""

    def __init__(self, channel: Channel, rows: dict[int, list[np.ndarray]], results: list[np.ndarray]):
        """Args: rows: of each rank of this machine its parts; they are overwritten."""
        self._comm, self._channel, self._rows, self._results = channel.comm, channel, rows, results
        # the sum goes along these: ranks of one machine whose numbers follow each other, and their leader
        self._hops = [
            (leader, [*ranks]) for leader, ranks in itertools.groupby(range(channel.size), channel.machine.__getitem__)
        ]
        self._own = [j for j, (leader, _) in enumerate(self._hops) if leader == channel.rank]
        # and the results along these
        last = self._hops[-1][0]
        path = [last, *sorted({*channel.machine} - {last}, reverse=True)]
        place = path.index(channel.rank)
        self._from, self._to = path[max(0, place - 1)], path[place + 1 : place + 2]
        self._tag, self._result_tag = bulk_tag(channel), bulk_tag(channel, 1)
        self._coming = [self._comm.Irecv(each, self._from, self._result_tag) for each in results] if place else []
        self._passed_on = 0  # results
        self._sent: list[Any] = []
        self._awaited = ((p, j) for p in range(len(results)) for j in self._own if j)
        self._sums: deque[tuple[Any, np.ndarray, np.ndarray]] = deque()  # (request, part, its memory)
        for _ in range(_AHEAD):
            self._await_next(np.empty(_PART_BYTES, np.uint8))

    def run(self, add: Add, finish: Finish) -> None:
        """Returns when all results are there, and sent on."""
        for p in range(len(self._results)):
            for j in self._own:
                self._add_rows(p, j, add, finish)
            while self._passed_on < len(self._coming) and self._coming[self._passed_on].Test():
                self._pass_on()
        while self._passed_on < len(self._coming):
            wait_for_all(self._channel, [self._coming[self._passed_on]])
            self._pass_on()
        wait_for_all(self._channel, self._sent)

    def _add_rows(self, p: int, j: int, add: Add, finish: Finish) -> None:
        """Adds part `p` of the ranks of hop `j` to the sum so far, in the memory of the first of these."""
        total, *others = (self._rows[k][p] for k in self._hops[j][1])
        if j:
            request, so_far, memory = self._sums.popleft()
            wait_for_all(self._channel, [request])
            add(so_far, total, total)
            self._await_next(memory)
        for row in others:
            add(total, row, total)
        if j + 1 < len(self._hops):
            self._sent.append(self._comm.Isend(total, self._hops[j + 1][0], self._tag))
        else:
            finish(total, self._results[p])
            self._pass_on()

    def _await_next(self, memory: np.ndarray) -> None:
        """Begins to receive the next sum to which this leader adds, if there is one more."""
        if (following := next(self._awaited, None)) is not None:
            p, j = following
            like = self._results[p]
            part = memory[: like.nbytes].view(like.dtype)
            self._sums.append((self._comm.Irecv(part, self._hops[j - 1][0], self._tag), part, memory))

    def _pass_on(self) -> None:
        """Sends on the next result, which is there."""
        self._sent += [self._comm.Isend(self._results[self._passed_on], k, self._result_tag) for k in self._to]
        self._passed_on += 1
