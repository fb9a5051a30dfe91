"""Adds up large arrays of ranks on several machines, in rank order, so the bits are those of one machine.

It runs in the process of each rank. The ranks of a machine write their arrays into memory that they share. The sum then
goes from machine to machine in parts; each leader adds its ranks' arrays and sends it on. The last one broadcasts the
results meanwhile, so a link carries every byte once in each direction, however many ranks there are.
"""

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from ..collectives.agreement import SECOND
from ..collectives.reduce import Reduction, add_in_messages
from ..host.segments import align
from .forwarding import kept_on_failure, tag_of_call, wait_for

if TYPE_CHECKING:
    from .channel import ClusterChannel

_ALONG, _TOGETHER = 1 << 18, 1 << 20  # bytes of a rank, of all, that go along with an agreement
_PART_BYTES, _PARTS = 1 << 18, 64  # small parts: the last machine waits for one from each before it; but not too many


def add_up(channel: "ClusterChannel", reduction: Reduction) -> Any:
    """Collective: `reduce.add_up`."""
    most = min(_ALONG, _TOGETHER // channel.size)
    if (total := add_in_messages(channel, reduction, most=most)) is not None:
        return total
    here, size = channel.here, align(reduction.layout.nbytes)
    nbytes = (len(here) + 1) * size
    if channel.leads:
        block, address = channel.lease(nbytes, channel.below)
        for k in channel.below:
            channel.messages.send(k, address)
        shared = address is not None or not channel.below
    else:
        address = channel.messages.receive(channel.above, reduction.op)
        shared = address is not None
        block = np.frombuffer(channel.pool.map(address), np.uint8) if address else np.empty(nbytes, np.uint8)
    *rows, result = block[:nbytes].reshape(-1, size)

    def write() -> bool:
        reduction.write(rows[here.index(channel.rank)])
        return shared

    if not channel.agree(reduction.op + SECOND, write, lambda shared: [all(shared)] * channel.size):
        return add_in_messages(channel, reduction, 2 * SECOND)
    if channel.leads:
        with channel.reported(reduction.op):
            _run(channel, reduction, dict(zip(here, rows)), result)
        for k in channel.below:
            channel.messages.send(k, None)
    else:
        channel.messages.receive(channel.above, reduction.op)
    return result


def _parts(reduction: Reduction, row: np.ndarray) -> list[np.ndarray]:
    """The arrays of a row, in which those of one dtype are one, in parts."""
    found = []
    for run in reduction.layout.runs(row):
        step = max(1, max(_PART_BYTES, reduction.layout.nbytes // _PARTS) // run.itemsize)
        found += [run[start : start + step] for start in range(0, len(run), step)]
    return found


def _run(channel: "ClusterChannel", reduction: Reduction, rows: dict[int, np.ndarray], result: np.ndarray) -> None:
    """What one leader does. Args: rows: of each rank of this machine; they are overwritten. result: gets the sum."""
    tag, requests = tag_of_call(channel), list[Any]()
    parts_of = {k: _parts(reduction, row) for k, row in rows.items()}
    results = _parts(reduction, result)
    # the sum goes along these: ranks of one machine whose numbers follow each other, and their leader
    neighbours = itertools.groupby(range(channel.size), channel.machine.__getitem__)
    hops = [(leader, [*ranks]) for leader, ranks in neighbours]
    own = [j for j, (leader, _) in enumerate(hops) if leader == channel.rank]
    tasks = [*itertools.product(range(len(results)), own)]  # (part, hop), in the order of all leaders
    last = hops[-1][0]
    root = channel.leaders.index(last)

    with kept_on_failure(channel, requests):
        if channel.rank != last:
            requests += [channel.between.Ibcast(part, root) for part in results]
        so_far = {(p, j): np.empty_like(results[p]) for p, j in tasks if j}
        coming = {(p, j): channel.comm.Irecv(part, hops[j - 1][0], tag) for (p, j), part in so_far.items()}
        requests += coming.values()
        for p, j in tasks:
            total, *others = (parts_of[k][p] for k in hops[j][1])
            if j:
                wait_for(channel, [coming[p, j]])
                np.add(so_far[p, j], total, out=total)
            for row in others:
                np.add(total, row, out=total)
            if j + 1 < len(hops):
                requests.append(channel.comm.Isend(total, hops[j + 1][0], tag))
                continue
            if reduction.divisor:
                np.divide(total, reduction.divisor, results[p])
            else:
                np.copyto(results[p], total)
            requests.append(channel.between.Ibcast(results[p], root))
        wait_for(channel, requests)
