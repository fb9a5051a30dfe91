"""The diffs of docs/cleanrl.md in a program of the same build: it runs as before, with the same bits on more ranks."""

import sys

import pytest
from conftest import ROOT, run
from markdown_pages import fenced, sections, side

# {0}, {1}, ... are the pieces of the page's diffs.
PROGRAM = """
import dataclasses
import types
from dataclasses import dataclass
{0}
import numpy as np
import torch

SummaryWriter = print
tyro = types.SimpleNamespace(cli=lambda kind: kind())


@dataclass
class Args:
    seed: int = 1
    env_id: str = "CartPole-v1"
    capture_video: bool = False
    num_envs: int = 3
    num_steps: int = 32
    num_iterations: int = 3
    track: bool = True
    anneal_lr: bool = True
    save_model: bool = True
{1}

def make_env(env_id, idx, capture_video, run_name):
    return lambda: gym.wrappers.NormalizeReward(gym.wrappers.NormalizeObservation(gym.make(env_id)))


if __name__ == "__main__":
{2}
    run_name = args.env_id
{3}
        print("tracked")
{4}
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
{5}
    envs = gym.vector.SyncVectorEnv([make_env(args.env_id, i, False, run_name) for i in range(args.num_envs)])
    agent = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(agent.parameters())
    storage = [torch.zeros(args.num_steps, args.num_envs, *shape) for shape in ((4,), (), (), ())]
    obs, logprobs, actions, rewards = storage
    global_step = 0
{6}
{7}
        if args.anneal_lr:
{8}
        optimizer.param_groups[0]["lr"] = 1e-3 * frac
        for step in range(args.num_steps):
{9}
            obs[step] = next_obs
            with torch.no_grad():
                policy = torch.distributions.Categorical(logits=agent(next_obs))
                action = policy.sample()
            actions[step], logprobs[step] = action, policy.log_prob(action)
            next_obs, reward, terminations, truncations, _ = envs.step(action.numpy())
            next_obs, next_done = torch.Tensor(next_obs), torch.Tensor(terminations | truncations)
            rewards[step] = torch.Tensor(reward)
        b_obs, b_logprobs, b_actions = obs.reshape(-1, 4), logprobs.reshape(-1), actions.reshape(-1)
        b_advantages = b_returns = b_values = rewards.reshape(-1)
{10}
        inds = np.random.permutation(len(b_obs))[: args.num_steps]
        loss = -(torch.distributions.Categorical(logits=agent(b_obs[inds])).log_prob(b_actions[inds]) * b_returns[inds])
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        print(global_step, len(b_obs), optimizer.param_groups[0]["lr"], loss.mean().item(), flush=True)
{11}
        print("saved")
{12}
"""
DIFFS = "\n\n".join(fenced(text, "diff").strip("\n") for title, text in list(sections("cleanrl.md").items())[:3])


def out(sign: str, n: int, folder) -> list[str]:
    """What the program prints before ("-") or after ("+")."""
    pieces = [side(diff, sign) for diff in DIFFS.split("\n\n")]
    assert PROGRAM.count("\n{") == len(pieces)
    text = PROGRAM
    for i, piece in enumerate(pieces):
        text = text.replace(f"\n{{{i}}}\n", f"\n{piece}")
    program = folder / f"program{sign}{n}.py"
    program.write_text(text.replace("nprocs: int = 1", f"nprocs: int = {n}"))
    done = run([sys.executable, program], 150, {"PYTHONPATH": str(ROOT)})
    assert done.status == 0, done.err
    return done.out.splitlines()


@pytest.mark.slow
def test_cleanrl_before_and_after(tmp_path):
    before, alone, some = (out(sign, ranks, tmp_path) for sign, ranks in (("-", 1), ("+", 1), ("+", 4)))
    assert alone == some and len(alone) == len(before) + 1 == 7
    assert [line.split()[:3] for line in alone[:-1]] == [line.split()[:3] for line in before]
