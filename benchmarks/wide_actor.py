"""Collecting segments with a wide policy: environments stepped together against one after the other, in turn.

    python -m benchmarks.wide_actor

One process with an untrained policy of 4.6 million parameters (Coady's sizes for Humanoid-v4: 3760, 799, 170) on one
thread. Together: as train.py collects with --batch_steps, several environments' observations in one product. Alone: a
row at once. Rows: the policy's outputs and nothing else.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

import mpi_util
from benchmarks import record
from policies.actor import Actor, init_params
from policies.scaler import Scaler
from trainer.config import Config
from trainer.control import Control
from trainer.run import Run, build_envs

ENVS = {"Humanoid-v4": "auto", "HalfCheetah-v4": "3760,1000,500"}
NUM_ENVS, N_STEPS = 16, 20


def rate(actor: Actor, height: int, work: Callable[[], Any], n: int) -> float:
    """Units of `work` per second of processor time, of which it does `n`."""
    actor.height = height
    start = time.process_time()
    work()
    return n / (time.process_time() - start)


def one_by_one(actor: Actor, rows: list[np.ndarray]) -> None:
    """Each row by itself."""
    for row in rows:
        actor.output(row)


def main() -> None:
    """Takes both ways in turn, and saves what they measured."""
    parser = record.command_line(__doc__, repeats=9)
    parser.add_argument("--only", type=record.words, default=list(ENVS), help=f"of {','.join(ENVS)} (default: all)")
    parser.add_argument("--steps", type=int, default=N_STEPS, help=f"of each environment (default: {N_STEPS})")
    args = parser.parse_args()
    found, claims = {}, []
    for env in args.only:
        widths, steps = ENVS[env], NUM_ENVS * args.steps
        config = Config(env=env, batch_steps=steps, num_envs=NUM_ENVS, policy_hid_list=widths)
        envs, spec = build_envs(config)
        actor = Actor(spec, init_params(spec, np.random.default_rng(0)))
        run = Run(config, False, mpi_util.StopRequest(), envs, spec, actor, Scaler(spec.obs_dim), Control(1.0))
        collector, height = run.collector(), actor.height
        rows = list(np.random.default_rng(0).standard_normal((NUM_ENVS, spec.obs_dim), dtype=np.float32))

        ways = {
            "rollout, together": partial(rate, actor, height, collector.collect, config.batch_steps),
            "rollout, alone": partial(rate, actor, 0, collector.collect, config.batch_steps),
            "rows, together": partial(rate, actor, height, partial(actor.outputs, rows), NUM_ENVS),
            "rows, alone": partial(rate, actor, 0, partial(one_by_one, actor, rows), NUM_ENVS),
        }
        with threadpool_limits(1):
            turns = record.in_turn(ways, args.repeats, warmup=1)
        found[env] = {name: record.spread(of_name) for name, of_name in turns.items()}
        for what in ("rollout", "rows"):
            ratio = found[env][f"{what}, together"]["median"] / found[env][f"{what}, alone"]["median"]
            claims.append(record.claim(f"{what} of {NUM_ENVS} {env}, together / alone", ratio, at_least=2.0))
    record.save(args, found, claims, unit="per second of processor time")


if __name__ == "__main__":
    main()
