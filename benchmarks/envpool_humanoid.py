"""The PPO of benchmarks/envpool_ppo.py on Humanoid-v4, as a run that can be continued.

    python benchmarks/envpool_humanoid.py --folder FOLDER --seed 20

For benchmarks.time_to_return. Runs in an interpreter that has envpool and torch.
"""

import argparse

import torch
from envpool_ppo import BETA1, BETA2, EPS, LR, MAX_GRAD_NORM, Agent, Rollout, update
from peer_run import PeerRun, command_line
from torch import nn

ENV, ENVS, ENV_THREADS, STEPS, ROWS = "Humanoid-v4", 20, 2, 4000, 125  # as in benchmarks.end_to_end


class Training:
    """Agent, optimizer and environments."""

    def __init__(self, run: PeerRun, seed: int):
        """Continues the run, or begins it."""
        torch.set_num_threads(1)
        torch.manual_seed(seed + run.steps)
        settings = {"env": ENV, "envs": ENVS, "env_threads": ENV_THREADS, "seed": seed + run.steps}
        self.rollout = Rollout(argparse.Namespace(**settings), STEPS // ENVS)
        self.agent = Agent(self.rollout.obs.shape[-1], self.rollout.act.shape[-1])
        self.optimizer = torch.optim.Adam(self.agent.parameters(), LR, (BETA1, BETA2), EPS, fused=True)
        self.scales = {"obs": self.rollout.obs_moments, "returns": self.rollout.return_moments}
        if run.checkpoint:
            saved = torch.load(run.checkpoint / "state.pt")
            self.agent.load_state_dict(saved["agent"])
            self.optimizer.load_state_dict(saved["optimizer"])
            for name, moments in self.scales.items():
                moments.count = saved[name]["count"]
                moments.mean, moments.var = (saved[name][key].numpy() for key in ("mean", "var"))

    def write(self, folder) -> None:
        """Weights, the optimizer's state, and the scales of observations and returns."""
        scales = {
            name: {"count": m.count, "mean": torch.as_tensor(m.mean), "var": torch.as_tensor(m.var)}
            for name, m in self.scales.items()
        }
        state = {"agent": self.agent.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state | scales, folder / "state.pt")

    def step(self, *minibatch) -> None:
        """One step of Adam."""
        self.optimizer.zero_grad()
        self.agent(*minibatch).backward()
        nn.utils.clip_grad_norm_(self.agent.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()

    def iterate(self) -> list[float]:
        """One batch and its update. Returns the returns of the episodes that ended."""
        self.rollout.collect(self.agent)
        update(self.step, self.rollout.batch(self.agent), ROWS)
        return self.rollout.episodes


def main() -> None:
    """Trains until there are --steps, or until it is stopped."""
    args = command_line(__doc__)
    run = PeerRun(args.folder)
    training, steps = Training(run, args.seed), run.steps
    while steps < args.steps and not run.stop:
        run.returns += training.iterate()
        steps += STEPS
        run.row(steps)
        run.stop |= steps >= args.steps
        if run.due():
            run.save(steps, training.write)


if __name__ == "__main__":
    main()
