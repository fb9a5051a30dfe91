"""The benchmarks start, measure and write it down, with settings that take seconds; no figure is judged here."""

import json
import shlex
import sys

import pytest
from conftest import ROOT, run, skip_without_hosts

PROGRAMS = {
    "averaging": "--repeats 2 --ranks 2 --mpi mpich --policy 2x64",
    "gather": "--repeats 2 --ranks 2 --mpi mpich --rows 600",
    "bcast": "--repeats 2 --ranks 2 --mpi mpich --policy 2x64",
    "idle": "--repeats 1 --ranks 2 --mpi mpich --steps 3 --contrast 0",
    "rollout": "--repeats 2 --ranks 2 --episodes 6",
    "collect": "--repeats 1 --ranks 2",
    "threads": "--repeats 1 --networks 2x64 --rows 64",
    "coady": "--repeats 1 --ranks 1 --iterations 3 --episodes 6",
    "end_to_end": "--repeats 1 --ranks 2 --iterations 3",
    "learning": "--repeats 2 --jobs 2 --only PPO-1M/Hopper-v4,PPO-default-1M/Humanoid-v4 --steps 2048",
    "time_to_return": f"--repeats 1 --ranks 1 --steps 3000 --returns 50,9000 --sb3_python {sys.executable}",
    "learning_time": "--repeats 1 --ranks 1 --iterations 4 --only PPO-1M/Hopper-v4",
    "own_program": "--repeats 1 --mpi mpich --ranks 2 --rows 64 --steps 1",
    "machines": "--repeats 1 --mpi mpich --hosts h1:1,h2:1 --most 2",
    "memory": "--repeats 1 --ranks 2",
    "examples": "--repeats 1 --only same_bits --iterations 2 --options=--episodes=10",
    "simulators": "--repeats 1 --mpi mpich --calls 20 --steps 2 --lengths 1",
    "sleeping": "--repeats 1 --ranks 1,3 --episodes 2",
    "wide_actor": "--repeats 1 --only HalfCheetah-v4 --steps 4",
    "update": "--repeats 1 --frameworks numpy",
    "overlap": "--repeats 1 --ranks 3 --epochs 1 --iterations 5 --segment 20",
    "soak_collectives": "--repeats 60 --mpi mpich",
    "soak_kills": "--repeats 1 --modes episodes",
    "soak_large": "--repeats 4 --elements 100000 --mpi mpich",
    "soak_ranks": "--repeats 1 --ranks 4 --mpi openmpi",
    "soak_trees": "--repeats 20 --trees 20 --mpi mpich",
    "soak_weight_sync": "--repeats 6 --sequences 3 --mpi mpich",
}


@pytest.mark.slow_unless(name="gather")
@pytest.mark.parametrize("name", PROGRAMS)
def test_writes_what_it_measured(name, tmp_path):
    if name == "machines":
        skip_without_hosts()
    command = [sys.executable, "-m", f"benchmarks.{name}", *shlex.split(PROGRAMS[name]), "--results", tmp_path]
    done = run(command, timeout=120)
    assert done.status == 0, done.out + done.err
    (result,) = tmp_path.glob(f"{name}*.json")  # its name has what --only chose, where the program writes parts
    record = json.loads(result.read_text())
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
    others |= {"tried"}  # in test_learning
    others |= {"spinup", "spinup_loop"}  # blocking MPI calls: minutes on a machine that has other work
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} == set(PROGRAMS) | others
