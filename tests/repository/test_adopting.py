"""The programs of docs/adopting.md, before and after, and the recipes run, the same on one rank and on three."""

import sys
from pathlib import Path

import pytest
from conftest import ROOT, run
from markdown_pages import blocks, fenced, sections, side

# What the pages call the reader's own.
YOURS = """
import numpy as np


def make_env():
    return gym.make("CartPole-v1")


np.random.seed(1)
env, agent = make_env(), {"w": np.zeros(4)}


def right(obs):
    return 1 / (1 + np.exp(-np.sum(obs * agent["w"], axis=-1)))


def act(agent, obs):
    return (np.random.random(obs.shape[:-1]) < right(obs)).astype(int)


def step(env, obs, rows):
    action = act(agent, obs)
    next_obs, rew, terminated, truncated, _ = env.step(int(action))
    rows.append((obs, action, rew))
    return next_obs, terminated or truncated


def stack(rows):
    return dict(zip(("obs", "act", "rew"), map(np.array, zip(*rows))))


def update(agent, batch):
    error = batch["act"] - right(batch["obs"]) + 0.1 * np.random.random()
    agent["w"] += (error[..., None] * batch["obs"]).reshape(-1, 4).mean(axis=0)
    print(len(batch["rew"]), agent["w"])
"""
PLAY = """
def play(seed):
    rows, obs, done = [], env.reset(seed=seed)[0], False
    while not done:
        obs, done = step(env, obs, rows)
    return stack(rows)
"""
CHECKSUM = "\nmpi_util.print0(mpi_util.chksum(agent))\n"
ITERATIONS = 3
# What a recipe has beyond that.
NEEDS = {
    "Recurrent policies: LSTM, GRU 1": """
import torch
torch.manual_seed(1)
lstm, head = torch.nn.LSTM(4, 8), torch.nn.Linear(8, 2)
optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()])
def update(lstm, head, sequences, batch):
    assert sequences.shape == (max(batch["length"]), 40, 4) and sum(batch["length"]) == len(batch["rew"])
    optimizer.zero_grad()
    head(lstm(sequences)[0]).square().mean().backward()
    optimizer.step()
    for key, value in [*lstm.named_parameters(), *head.named_parameters()]:
        agent[key] = value.detach().numpy()
    print(len(batch["rew"]))
""",
    "Normalise observations 1": """
def act(agent, obs):
    return int(np.random.random() < right((obs - scale.mean) / np.sqrt(scale.var + 1e-8)))
""",
    "Evaluation on all ranks 1": """
def evaluate(seed):
    return {"returns": play(seed)["rew"].sum()}
""",
    "Checkpoints 1": "from pathlib import Path\n",
    "Progress bar, TensorBoard, wandb 1": """
import wandb
from tensorboardX import SummaryWriter
from tqdm import tqdm
""",
}
WANDB = """
def init(project):
    print("wandb.init", flush=True)
    return __import__("sys").modules[__name__]
def log(row):
    print("wandb.log", flush=True)
"""


SHAPES = {title: fenced(text, "diff") for title, text in sections("adopting.md").items() if "```diff" in text}
START = SHAPES.pop("Start N processes")
RECIPES = {
    f"{title} {n}": side(START, "+") + YOURS + PLAY + NEEDS.get(f"{title} {n}", "") + code + CHECKSUM
    for title, text in sections("recipes.md").items()
    for n, code in enumerate(blocks(text, "python"), 1)
}


def shortened(text: str) -> str:
    return text.replace("range(20)", f"range({ITERATIONS})").replace("(first, 20)", f"(first, {ITERATIONS})")


def start(text: str, n: int, folder: Path) -> str:
    """Runs a program on n ranks in a folder of its own, and returns what it printed."""
    folder.mkdir(exist_ok=True)
    (folder / "wandb.py").write_text(WANDB)
    (folder / "program.py").write_text(shortened(text).replace("mpi_fork(4", f"mpi_fork({n}"))
    done = run([sys.executable, "program.py"], 100, {"PYTHONPATH": f"{ROOT}:{folder}"}, cwd=folder)
    assert done.status == 0, done.err
    return done.out


@pytest.mark.parametrize("shape", SHAPES)
def test_a_program_before_and_after(shape, tmp_path):
    before, after = (side(START, sign) + YOURS + side(SHAPES[shape], sign) for sign in "-+")
    assert "mpi_util" not in before
    out = start(before, 1, tmp_path / "before")
    alone, three = (start(after + CHECKSUM, n, tmp_path / str(n)) for n in (1, 3))
    assert alone == three and len(out.splitlines()) == len(alone.splitlines()) - 1 == ITERATIONS


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_prints_the_same_on_one_and_three_ranks(recipe, tmp_path):
    text = RECIPES[recipe].replace('render_mode="human"', 'render_mode="rgb_array"')
    alone, three = (start(text, n, tmp_path / str(n)) for n in (1, 3))
    assert alone == three
    assert len(alone.splitlines()) > ITERATIONS or "update(" not in text.partition(PLAY)[2]


@pytest.mark.slow
def test_the_quick_way(tmp_path):
    text = fenced(sections("eight_steps.md")["The quick way, and what it gives up"], "python")
    seed, gather = text.partition("batch =")[::2]
    program = f"""{side(START, "+")}
import torch
from types import SimpleNamespace
args = SimpleNamespace(seed=1, num_envs=8)
{seed}
own = {{"x": torch.rand(n_own)}}
batch ={gather}
mpi_util.print0(batch["x"].unique().shape, torch.equal(batch["x"][:n_own], own["x"]))
"""
    assert start(program, 3, tmp_path / "3") == "torch.Size([8]) True\n"


@pytest.mark.slow
def test_a_run_continues_from_its_checkpoint(tmp_path):
    text = RECIPES["Checkpoints 1"]
    whole = start(text, 3, tmp_path / "whole")
    first = start(text.replace("(first, 20)", f"(first, {ITERATIONS - 1})"), 1, tmp_path / "run")
    rest = start(text, 3, tmp_path / "run")
    assert whole.splitlines() == [*first.splitlines()[:-1], *rest.splitlines()] and len(rest.splitlines()) == 2
