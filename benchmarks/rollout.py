"""Collecting rollouts on Humanoid-v4 against bare env.step, in turn in the same processes.

    python -m benchmarks.rollout

Both sides step the same gymnasium.make(id, disable_env_checker=True) with its limits and time steps, reset it after
each episode (resets count), and deal whole episodes to the ranks as they become free. Bare: uniformly random actions,
drawn beforehand, and nothing is kept. Rollout: as train.py collects, with an untrained 2x64 NumPy actor,
observation scaling, noise, values, advantages and returns. Episodes of either are 20 to 25 steps long.
"""

import argparse
import time

import numpy as np

import mpi_util
from benchmarks import record
from policies.actor import Actor, init_params
from policies.scaler import Scaler
from trainer.config import Config
from trainer.control import Control
from trainer.environment import make_env
from trainer.run import Run
from trainer.startup import build_envs

ENV = "Humanoid-v4"


def main() -> None:
    """Starts a part for each rank count and MPI library, and saves what they measured."""
    parser = record.command_line(__doc__, repeats=15, ranks="1,2")
    parser.add_argument("--episodes", type=int, default=400, help="per sample, all ranks together (default: 400)")
    args = parser.parse_args()
    if args.part:
        return part(args)
    samples, claims = {}, []
    for mpi in args.mpi:
        for n in args.ranks:
            arguments = ("--ranks", n, "--episodes", args.episodes, "--repeats", args.repeats)
            turns = record.run_part("benchmarks.rollout", mpi, *arguments)
            found = {name: record.spread([t["steps_per_s"] for t in of_name]) for name, of_name in turns.items()}
            lengths = {name: np.mean([t["episode_length"] for t in of_name]) for name, of_name in turns.items()}
            samples[f"{mpi}, {n} ranks"] = {"steps_per_s": found, "mean_episode_length": lengths}
            ratio = found["rollout"]["median"] / found["bare"]["median"]
            text = f"rollout on {ENV}, {n} rank{'s' * (n > 1)}, {mpi}: rate / bare stepping"
            claims.append(record.claim(text, ratio, at_least=0.8))
    record.save(args, samples, claims, unit="environment steps per second, all ranks together")


def part(args: argparse.Namespace) -> None:
    """Measures on one number of ranks."""
    if mpi_util.mpi_fork(args.ranks[0]) == "parent":
        return
    ways = {"bare": Bare(args.episodes), "rollout": Rollout(args.episodes)}
    turns = record.in_turn({name: way.sample for name, way in ways.items()}, args.repeats, warmup=1)
    if mpi_util.rank == 0:
        record.write_part(args.part, turns)


class Stepping:
    """Collective: steps whole episodes, dealt to the ranks."""

    def collect(self) -> int:
        """This rank's number of steps."""
        raise NotImplementedError

    def __init__(self, n_episodes: int):
        self.n_episodes = n_episodes

    def sample(self) -> dict[str, float]:
        """steps_per_s and episode_length of all ranks' episodes, until the last rank is done."""
        mpi_util.all_sum(0)
        start = time.perf_counter()
        steps = int(mpi_util.all_sum(self.collect()))
        seconds = time.perf_counter() - start
        return {"steps_per_s": steps / seconds, "episode_length": steps / self.n_episodes}


class Bare(Stepping):
    """env.step with random actions, and nothing else."""

    def __init__(self, n_episodes: int):
        super().__init__(n_episodes)
        self.env = make_env(ENV, {}, quiet=True)
        space = self.env.action_space
        self.actions = np.random.default_rng(0).uniform(space.low, space.high, (1000, *space.shape)).astype(np.float32)

    def collect(self) -> int:
        """This rank's number of steps."""
        n_steps = 0
        for i in mpi_util.deal(self.n_episodes):
            self.env.reset(seed=i)
            ended = False
            while not ended:
                _, _, terminated, truncated, _ = self.env.step(self.actions[n_steps % len(self.actions)])
                ended = terminated or truncated
                n_steps += 1
        return n_steps


class Rollout(Stepping):
    """The episodes of train.py's rollout phase."""

    def __init__(self, n_episodes: int):
        super().__init__(n_episodes)
        config = Config(env=ENV, nprocs=mpi_util.nworkers, batch_size=n_episodes)
        envs, spec = build_envs(config)
        scaler = Scaler(spec.obs_dim)
        actor = Actor(spec, init_params(spec, np.random.default_rng(0)))
        actor.refresh()
        run = Run(config, False, mpi_util.StopRequest(), envs, spec, actor, scaler, Control(rew_scale=1.0))
        self._collector = run.collector()

    def collect(self) -> int:
        """This rank's number of steps."""
        return sum(len(batch["adv"]) for batch in self._collector.collect().batches)


if __name__ == "__main__":
    main()
