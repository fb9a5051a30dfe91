"""The benchmarks start, measure and write it down, with settings that take seconds; no figure is judged here."""

import json
import shlex
import sys

import numpy as np
import pytest
from conftest import ROOT, run, skip_without_hosts

from benchmarks import end_to_end, scaling
from policies.returns import gae

PROGRAMS = {
    "advice": "--repeats 1 --iterations 6 --only 'HalfCheetah-v5, trpo, 2x64'",
    "averaging": "--repeats 2 --ranks 2 --mpi mpich --policy 2x64",
    "gather": "--repeats 2 --ranks 2 --mpi mpich --rows 600",
    "bcast": "--repeats 2 --ranks 2 --mpi mpich --policy 2x64",
    "idle": "--repeats 1 --ranks 2 --mpi mpich --steps 3 --contrast 0",
    "rollout": "--repeats 2 --ranks 2 --episodes 6",
    "coady": "--repeats 1 --ranks 1 --iterations 3 --episodes 6",
    "end_to_end": "--repeats 1 --ranks 2 --iterations 3",
    "learning": "--repeats 2 --jobs 2 --only PPO-1M/Hopper-v4,PPO-default-1M/Humanoid-v4 --steps 4096",
    "time_to_return": f"--repeats 1 --ranks 1 --steps 3000 --returns 50,9000 --sb3_python {sys.executable}",
    "learning_time": "--repeats 1 --ranks 1 --iterations 4 --only PPO-1M/Hopper-v4",
    "own_program": "--repeats 1 --mpi mpich --steps 1",
    "machines": "--repeats 1 --mpi mpich --hosts h1:1,h2:1 --most 2",
    "leaders": "--repeats 1 --mpi mpich --hosts h1:1,h2:1",
    "memory": "--repeats 1 --ranks 2",
    "examples": "--repeats 1 --only same_bits --iterations 2 --options=--episodes=10",
    "sleeping": "--repeats 1 --ranks 1,3 --episodes 2",
    "wide_actor": "--repeats 1",
    "update": "--repeats 1 --frameworks numpy",
    "overlap": "--repeats 1 --epochs 1 --iterations 5",
    "soak_collectives": "--repeats 60 --mpi mpich",
    "soak_kills": "--repeats 1 --modes episodes",
    "soak_large": "--repeats 4 --elements 100000 --mpi mpich",
    "soak_ranks": "--repeats 1 --ranks 8 --mpi openmpi",
    "soak_trees": "--repeats 20 --trees 20 --mpi mpich",
    "soak_weight_sync": "--repeats 6 --sequences 3 --mpi mpich",
}


@pytest.mark.slow_unless(name="gather")
@pytest.mark.parametrize("name", PROGRAMS)
def test_writes_what_it_measured(name, tmp_path):
    if name in ("machines", "leaders"):
        skip_without_hosts()
    command = [sys.executable, "-m", f"benchmarks.{name}", *shlex.split(PROGRAMS[name]), "--results", tmp_path]
    done = run(command, timeout=120)
    assert done.status == 0, done.out + done.err
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert record["command"].startswith(f"python -m benchmarks.{name} --repeats")
    assert record["machine"]["cores"] >= 1 and "numpy" in record["versions"]
    spreads = list(find_spreads(record["samples"]))
    assert spreads and all(0 <= s["min"] <= s["median"] <= s["max"] for s in spreads)
    assert all(claim["met"] in (True, False) for claim in record["claims"])
    assert not record.get("failures")


def find_spreads(samples: dict) -> list[dict]:
    """Every {min, median, max, n} in the samples, however deep."""
    if "median" in samples:
        return [samples]
    return [s for part in samples.values() if isinstance(part, dict) for s in find_spreads(part)]


OTHER = """
import json, pathlib, sys
program, *options = sys.argv[1:]
assert pathlib.Path(program).exists()
settings = dict(zip(options[::2], options[1::2]))
rates = {"compiled": 20.0, "none": 100.0, "eager": 10.0 + float(settings["--threads"])}
rate = rates[settings["--update"]] if program.endswith("envpool_ppo.py") else float(settings["--envs"])
pathlib.Path(settings["--out"]).write_text(json.dumps({"steps_per_s": rate, "versions": {"python": program}}))
"""


def test_end_to_end_compares_with_the_best_of_each(tmp_path, monkeypatch):
    other = tmp_path / "python"  # stands in for an interpreter that has another learner
    other.write_text(f"#!{sys.executable}\n{OTHER}")
    other.chmod(0o755)
    options = f"--repeats 1 --ranks 2 --sb3_python {other} --envpool_python {other} --results {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["end_to_end.py", *options.split()])
    monkeypatch.setattr(end_to_end, "ours", lambda n, args: 36.0)
    end_to_end.main()
    record = json.loads((tmp_path / "end_to_end.json").read_text())
    assert [(claim["claim"].partition(" / ")[2], claim["measured"], claim["met"]) for claim in record["claims"]] == [
        ("SB3's best (1 worker, 20 environments, 1 torch threads)", 1.8, False),
        ("EnvPool's best (2 torch threads)", 3.0, True),
        ("compiled EnvPool's best (1 torch threads)", 1.8, True),
    ]
    assert record["envpool_versions"]["python"].endswith("benchmarks/envpool_ppo.py")


@pytest.mark.envpool
def test_envpool_ppo_does_the_same_work(tmp_path):
    program, out = ROOT / "benchmarks" / "envpool_ppo.py", tmp_path / "out.json"
    done = run([sys.executable, program, "--iterations", 3, "--out", out], timeout=120)
    assert done.status == 0, done.out + done.err
    found = json.loads(out.read_text())
    network = 376 * 64 + 64 + 64 * 64 + 64  # but for its last layer
    assert sum(found["parameters"].values()) == 2 * network + 64 * 17 + 17 + 64 + 1 + 17
    assert (found["env_steps"], found["optimizer_steps"]) == (3 * 4000, 3 * 10 * 32)
    assert found["steps_per_s"] > 0 and 0 < found["reset_share"] < 0.06 and min(found["returns"]) > 90


@pytest.mark.envpool
def test_envpool_ppo_has_the_same_advantages():
    from benchmarks.envpool_ppo import GAMMA, LAM, advantages

    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(9, 2)), rng.normal(size=(10, 2))
    done, terminated = np.zeros((2, 9, 2), bool)
    done[3, 0] = terminated[3, 0] = done[5, 1] = True  # the other is cut off
    found = advantages(rewards, values, terminated, done)
    for i, end in enumerate((4, 6)):
        last = 0.0 if i == 0 else values[end, i]
        expected = gae(rewards[:end, i], values[:end, i], last, GAMMA, LAM)
        np.testing.assert_allclose(found[:end, i], expected, rtol=1e-5, atol=1e-6)
        expected = gae(rewards[end:, i], values[end:9, i], values[9, i], GAMMA, LAM)
        np.testing.assert_allclose(found[end:, i], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.envpool
def test_envpool_ppo_compiled_is_the_same():
    import torch

    from benchmarks.envpool_ppo import Agent, compiled_step, eager_step

    torch.manual_seed(0)
    agents = [Agent(5, 2) for _ in range(2)]
    agents[1].load_state_dict(agents[0].state_dict())
    steps = [make(agent) for make, agent in zip((eager_step, compiled_step), agents)]
    for _ in range(30):
        minibatch = torch.randn(16, 5), torch.randn(16, 2), torch.randn(16) - 1, 4 * torch.randn(16), torch.randn(16)
        for step in steps:
            step(*minibatch)
    for eager, compiled in zip(*(agent.parameters() for agent in agents)):
        torch.testing.assert_close(eager, compiled, rtol=1e-3, atol=1e-5)


def test_table_shows_each_claim(tmp_path):
    claims = [{"claim": "time / memcpy", "target": "<= 1", "measured": 0.875, "met": True}]
    (tmp_path / "gather.json").write_text(json.dumps({"claims": claims}))
    done = run([sys.executable, "-m", "benchmarks.table", "--results", tmp_path], timeout=30)
    assert done.out.splitlines()[2:] == ["| time / memcpy | <= 1 | 0.875 | yes |"]


def test_every_program_is_tried_or_is_left_out_on_purpose():
    others = {
        "record",
        "table",
        "scaling",
        "sleeping_env",
        "sb3_ppo",
        "envpool_ppo",
        "weight_sync",
    }  # no programs, or need other interpreters
    others |= {"soak"}  # what the soak programs share
    others |= {"sb3_parallel", "torchrl_suite"}  # many minutes; the second needs a checkout of torchrl
    others |= {"peer_run", "sb3_humanoid", "envpool_humanoid"}  # parts of time_to_return
    others |= {"background", "learning_tasks", "learning_results", "learning_doc"}  # parts of learning
    others |= {"spinup", "spinup_loop"}  # blocking MPI calls: minutes on a machine that has other work
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} == set(PROGRAMS) | others


def test_the_simulation_of_scaling():
    costs = scaling.Costs(1e-5, 1e-5, {"all": 0.1, "member": 0.01, "leader": 0.02, "rank": 1e-4})
    assert scaling.last_done(np.array([3.0, 1.0, 1.0, 1.0, 2.0]), 2) == 5.0
    alone, two, many = (scaling.simulate(n, 200, 1e-3, costs) for n in (1, 2, 10_000))
    steps = scaling.lengths(200)
    assert alone.rollout == pytest.approx(steps.sum() * 1.01e-3) and alone.agree == 0
    assert alone.rollout / 2 <= two.rollout < alone.rollout * 0.6 and two.update == alone.update
    assert many.rollout == pytest.approx(steps.max() * 1.01e-3)
    assert many.agree == pytest.approx(2 * (1e-4 + 63e-5 + 64e-5 + 1e-3 + 6 * scaling.HOP_S))
    limits = [scaling.limit(episodes, 1e-3, costs) for episodes in scaling.EPISODES.values()]
    assert 16 <= limits[0] <= 200
    assert scaling.tables(costs).count("|") > 300
