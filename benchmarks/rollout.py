"""Collecting rollouts on Humanoid-v4 against bare env.step, in turn in the same processes.

    python -m benchmarks.rollout

Both sides step the same gymnasium.make(id, disable_env_checker=True) with its limits and time steps, reset it after
each episode (resets count), and deal whole episodes to the ranks as they become free. Rollout: as train.py collects,
with an untrained 2x64 NumPy actor, observation scaling, noise, values, advantages and returns. Bare: the same episodes,
with the actions that the actor took in them, recorded beforehand; nothing is kept. They are 20 to 25 steps long.
"""

import argparse
import time

import gymnasium as gym
import numpy as np

import mpi_util
from benchmarks import record
from policies.actor import Actor, init_params
from policies.scaler import Scaler
from trainer.config import Config
from trainer.control import Control
from trainer.rollout import Episode
from trainer.run import Run, build_envs

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
            claims.append(record.claim(text, ratio, at_least=0.92))
    record.save(args, samples, claims, unit="environment steps per second, all ranks together")


def part(args: argparse.Namespace) -> None:
    """Measures on one number of ranks."""
    if mpi_util.mpi_fork(args.ranks[0]) == "parent":
        return
    rollout = Rollout(args.episodes)
    ways = {"bare": Bare(rollout), "rollout": rollout}
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


class Rollout(Stepping):
    """The episodes of train.py's rollout phase."""

    def __init__(self, n_episodes: int):
        super().__init__(n_episodes)
        config = Config(env=ENV, nprocs=mpi_util.nworkers, batch_size=n_episodes)
        envs, spec = build_envs(config)
        scaler = Scaler(spec.obs_dim)
        actor = Actor(spec, init_params(spec, np.random.default_rng(0)))
        actor.refresh()
        run = Run(config, False, mpi_util.StopRequest(), envs, spec, actor, scaler, Control(1.0))
        self.collector = run.collector()

    def collect(self) -> int:
        """This rank's number of steps."""
        return sum(len(batch["adv"]) for batch in self.collector.collect().values())


class Bare(Stepping):
    """env.step with the actions of a rollout's episodes, and nothing else."""

    def __init__(self, rollout: Rollout):
        super().__init__(rollout.n_episodes)
        runner = rollout.collector.runner
        self.env, self.episodes, recorder = runner.env, [], Recorder(runner.env)
        runner.env = recorder
        for i in range(self.n_episodes):
            runner.start(Episode((i,)))
            runner.run()
            self.episodes.append((recorder.seed, recorder.actions))
        runner.env = self.env

    def collect(self) -> int:
        """This rank's number of steps."""
        n_steps = 0
        for i in mpi_util.deal(self.n_episodes):
            seed, actions = self.episodes[i]
            self.env.reset(seed=seed)
            for action in actions:
                self.env.step(action)
            n_steps += len(actions)
        return n_steps


class Recorder:
    """An environment that keeps the seed and the actions of its last episode."""

    def __init__(self, env: gym.Env):
        self._env = env

    def reset(self, seed: int) -> tuple[np.ndarray, dict]:
        """Begins an episode."""
        self.seed, self.actions = seed, []
        return self._env.reset(seed=seed)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Keeps a copy of the action."""
        self.actions.append(action.copy())
        return self._env.step(action)


if __name__ == "__main__":
    main()
