"""One thread against one for each core, for networks of several sizes: what `mpi_util/ranks/threads.py` decides by.

    python -m benchmarks.threads

A step of PPO on a policy and a value function of `layers` hidden layers (17 observations, 6 actions, Adam) in torch,
and, for NumPy, the product of a minibatch with a hidden layer's weights; on idle cores, and beside a process that keeps
one of them busy. Both numbers of threads in turn; of the means of `--seconds` each the median counts.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks import record
from mpi_util import usable_cores
from mpi_util.ranks.threads import environment

NETWORKS = {"2x64": (64, 64), "2x256": (256, 256), "3x512": (512,) * 3}
ROWS = (64, 256, 4000)


def torch_step(layers: tuple[int, ...], rows: int) -> tuple[Callable[[], object], Callable[[int], object]]:
    """A step of the update, and how to give it its threads."""
    import torch
    from torch import nn

    def network(n_out: int) -> nn.Module:
        sizes = (17, *layers)
        hidden = [m for n, m in itertools.pairwise(sizes) for m in (nn.Linear(n, m), nn.Tanh())]
        return nn.Sequential(*hidden, nn.Linear(sizes[-1], n_out))

    policy, value = network(6), network(1)
    parameters = [*policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(parameters, 3e-4)
    observes, actions, advantages = torch.randn(rows, 17), torch.randn(rows, 6), torch.randn(rows)

    def step() -> None:
        logp = torch.distributions.Normal(policy(observes), 1.0).log_prob(actions).sum(1)
        loss = (
            -((logp - logp.detach()).exp() * advantages).mean() + (value(observes)[:, 0] - advantages).square().mean()
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()

    return step, torch.set_num_threads


def numpy_product(layers: tuple[int, ...], rows: int) -> tuple[Callable[[], object], Callable[[int], object]]:
    """A product of a minibatch with the weights of a hidden layer, and how to give it its threads."""
    import numpy as np
    import threadpoolctl

    rng = np.random.default_rng(0)
    batch, weights = (rng.standard_normal((n, layers[0]), dtype=np.float32) for n in (rows, layers[0]))
    return lambda: batch @ weights, threadpoolctl.threadpool_limits


@contextlib.contextmanager
def beside(n: int) -> Iterator[None]:
    """Processes that keep `n` cores busy."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def mean_ms(work: Callable[[], object], seconds: float) -> float:
    """Milliseconds of wall-clock time that `work` takes, the first time not counted."""
    work()
    began = time.perf_counter()
    for n in itertools.count(1):
        work()
        if (taken := time.perf_counter() - began) > seconds:
            return 1e3 * taken / n
    raise AssertionError


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Both numbers of threads in turn, for each network, number of rows and library."""
    found, cores = {}, usable_cores()
    for network, rows, make in itertools.product(args.networks, args.rows, (torch_step, numpy_product)):
        work, set_threads = make(NETWORKS[network], rows)

        def sample(n: int, work=work, set_threads=set_threads) -> float:
            set_threads(n)
            return mean_ms(work, args.seconds)

        with beside(args.busy):
            taken = record.in_turn({str(n): partial(sample, n) for n in (1, cores)}, args.repeats)
        name = f"{make.__name__}, {network}, {rows} rows, {args.busy} busy"
        found |= {f"{name}, {n} threads": record.spread(values) for n, values in taken.items()}
        gain = statistics.median(taken["1"]) / statistics.median(taken[str(cores)])
        print(f"{name}: {gain:.2f} times as fast with {cores} threads", flush=True)
    return found


def main() -> None:
    """Measures idle and with a busy core, each in a process of its own, and saves both."""
    parser = record.command_line(__doc__, repeats=3)
    parser.add_argument("--seconds", type=float, default=0.03, help="at least, of a sample (default: 0.03)")
    parser.add_argument("--networks", type=record.words, default=list(NETWORKS))
    parser.add_argument("--rows", type=record.numbers, default=list(ROWS))
    parser.add_argument("--busy", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        record.write_part(args.part, measure(args))
        return
    found = {}
    os.environ |= environment(os.environ)  # a rank's, how long threads spin among it
    for busy in (0, 1):
        found |= record.run_part("benchmarks.threads", args.mpi[0], *sys.argv[1:], "--busy", busy)
    record.save(args, found, [], unit="milliseconds")


if __name__ == "__main__":
    main()
