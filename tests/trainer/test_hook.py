"""train.py --hook: a function of the user's own in each iteration, with the same bits at any size and over a resume."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from training import rows, train

from trainer.config import Config
from trainer.hook import SCHEDULED, Hook

WORK = ["CartPole-v1", "--batch_steps", 64, "--num_envs", 2, "--lr_schedule", "constant"]
HOOKS = '''
def slower(run, row):
    """Another step size and clip range after each row; a count of its own; the end after six rows."""
    run.state["n"] = run.state.get("n", 0) + 1
    run.set(lr=3e-4 / run.state["n"], clip=0.3 / run.state["n"], ent_coef=0.01 * run.state["n"], epochs=2)
    row["N"] = run.state["n"]
    if run.state["n"] == 6:
        run.stop()


def bad(run, row):
    raise ZeroDivisionError("in the hook")


def none(run, row):
    pass
'''


@pytest.fixture
def hooked(tmp_path):
    """hooked(name, ...): train.py with a function of HOOKS."""
    (tmp_path / "myhooks.py").write_text(HOOKS)

    def start(name, *arguments, folder=None, **more):
        folder = tmp_path / (folder or name)
        where = ["--run_dir", folder] if not folder.exists() else ["--resume", folder]
        words = WORK + ["--hook", f"myhooks:{name}"] if not folder.exists() else []
        return folder, train(*words, *where, *arguments, env={"PYTHONPATH": f"{tmp_path}"}, **more)

    return start


def bits(folder: Path) -> tuple:
    return (folder / "policy.safetensors").read_bytes(), rows(folder)


def test_it_sets_adds_and_stops_with_the_same_bits_at_any_size_and_over_a_resume(hooked):
    alone, done = hooked("slower", "--total_steps", 640)
    assert [row["N"] for row in rows(alone)] == [f"{n}.0" for n in range(1, 7)] and "done: 6 iterations" in done.out
    three, _ = hooked("slower", "--total_steps", 640, "--nprocs", 2, "--overlap", folder="o")
    again, _ = hooked("slower", "--total_steps", 192, folder="again")
    hooked("slower", "--total_steps", 640, "--nprocs", 2, folder="again")
    assert bits(again) == bits(alone)
    plain, _ = hooked("none", "--total_steps", 384)
    assert bits(plain)[0] != bits(alone)[0] and len(rows(three)) == 6


@pytest.mark.slow
def test_average_follows_it_on_every_rank(hooked):
    how = ["--nprocs", 2, "--parallel", "average", "--total_steps", 640]
    whole, _ = hooked("slower", *how)
    again, _ = hooked("slower", *how[:-1], 192, folder="again")
    hooked("slower", *how[:2], *how[4:], folder="again")
    assert bits(again) == bits(whole) and len(rows(whole)) == 6


@pytest.mark.parametrize("n", [1, 2])
def test_an_error_in_it_is_one_report(hooked, n):
    folder, done = hooked("bad", "--total_steps", 640, "--nprocs", n, status=1)
    assert done.err.count("Traceback") == 1 and "ZeroDivisionError: in the hook" in done.err
    assert n == 1 or re.search(r"rank 0 \(phase hook, iteration 1\): uncaught", done.err)
    assert (folder / "checkpoint.safetensors").exists()


@pytest.mark.parametrize("name", ["nix:f", "os:nix", "os"])
def test_a_wrong_name_is_one_line_before_anything_starts(tmp_path, name):
    done = train(*WORK, "--hook", name, "--nprocs", 2, "--run_dir", tmp_path / "run", status=2)
    first, *others = done.err.splitlines()
    assert first.startswith(f"train.py: --hook {name}: ") and first.endswith("for a function in MODULE.py")
    assert all("mpi_util: " in line for line in others) and not (tmp_path / "run").exists()


def test_what_it_may_change(tmp_path):
    config = Config.of("ppo", env="CartPole-v1", hook="examples.hook:anneal", batch_steps=2000)
    hook = Hook(config, tmp_path, {})
    for wrong, line in {"gamma": "cannot change gamma", "lr": "--lr is -1.0"}.items():
        with pytest.raises(ValueError, match=line):
            hook.set(**{wrong: -1.0})
    hook.set(lr=np.float64(config.lr))
    assert hook.config == config and type(hook.config.lr) is float and {"lr", "clip"} <= set(SCHEDULED)
    for i in range(45):
        added = hook.columns({"AverageEpRet": 5.0 - i})
    assert added == {"BestEpRet": 5.0} and hook.stopped and hook.config.lr == config.lr / 16
    again = Hook(config, tmp_path, json.loads(json.dumps({"changed": hook.changed, "state": hook.state})))
    assert (again.state, again.config) == (hook.state, hook.config)
