"""mpi_util_spinup.run_utils: names and folders of experiments, and scripts that run them on ranks."""

import errno
import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import RANKS, ROOT, mpi_environment, run

from mpi_util.errors import UsageError
from mpi_util.host.cores import usable_cores
from mpi_util.ranks.state import made
from mpi_util_spinup.experiment import Experiment, Schedule
from mpi_util_spinup.run_utils import ExperimentError, ExperimentGrid, setup_logger_kwargs

SCRIPT = RANKS / "spinup_grid.py"


def script(folder, *arguments, status=0, mpi="mpich"):
    finished = run([sys.executable, SCRIPT, *arguments], 60, mpi_environment(mpi), cwd=folder)
    assert finished.status == status, f"status {finished.status}\n{finished.out}\n{finished.err}"
    return finished


def statuses(out):
    """The table at the end, as {run: status}."""
    rows = [re.split(r"\s{2,}", line) for line in out[out.index("\nrun  ") :].splitlines()[2:]]
    return {row[0]: row[1] for row in rows if len(row) > 2}


def cells(path):
    header, *rows = (line.split("\t") for line in path.read_text().splitlines())
    return [dict(zip(header, row)) for row in rows]


# ---- names and folders


def test_folders():
    assert setup_logger_kwargs("ppo", data_dir="/d") == {"output_dir": "/d/ppo", "exp_name": "ppo"}
    assert setup_logger_kwargs("ppo", 0) == {"output_dir": "data/ppo/ppo_s0", "exp_name": "ppo"}
    day, second = r"\d{4}-\d\d-\d\d", r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d"
    stamped = setup_logger_kwargs("ppo", 20, "d", datestamp=True)
    assert re.fullmatch(f"d/{day}_ppo/{second}-ppo_s20", stamped["output_dir"]) and stamped["exp_name"] == "ppo"


def example():
    grid = ExperimentGrid("Grid")
    grid.add("seed", [0, 10])
    grid.add("base:one:a", [1, 2], "a")
    grid.add("base:two", ["X y", "z"])
    grid.add("why", [True, False])
    grid.add("huh", 5)
    grid.add("act", [max], in_name=True)
    return grid


def test_variants_are_nested_and_in_order():
    variants = example().variants()
    assert len(variants) == 16
    assert variants[0] == {"seed": 0, "base": {"one": {"a": 1}, "two": "X y"}, "why": True, "huh": 5, "act": max}
    assert [v["seed"] for v in variants] == [0] * 8 + [10] * 8
    assert [v["why"] for v in variants[:4]] == [True, False, True, False]


def test_names_hold_what_varies_and_no_seed():
    grid = example()
    names = [grid.variant_name(v) for v in grid.variants()]
    assert names[:3] == ["Grid_a1_bas-twox-y_why_actmax", "Grid_a1_bas-twox-y_actmax", "Grid_a1_bas-twoz_why_actmax"]
    assert names[:8] == names[8:] and len(set(names)) == 8
    lists = ExperimentGrid()
    lists.add("ac_kwargs:hidden_sizes", [(32,), [64, 0.5]])
    assert [lists.variant_name(v) for v in lists.variants()] == ["ac-hid32", "ac-hid64-0-5"]


def test_the_report_counts_variants(capsys):
    example().print()
    out = capsys.readouterr().out
    assert re.search(r"counting seeds: +16\n.*not counting seeds: +8\n", out)
    assert "[bas-two]" in out and "\tX y\n" in out


@pytest.mark.parametrize(
    "keys, text",
    [
        ([("a", [])], "'a' has no value"),
        ([("a", 1), ("a", 2)], "'a' and 'a' set the same argument"),
        ([("a:b", 1), ("a", 2)], "'a' and 'a:b' set the same argument"),
        ([("a", 1), ("a:b", 2)], "'a:b' and 'a' set the same argument"),
        ([(3, 1)], "must be strings"),
    ],
)
def test_parameters_that_make_no_sense(keys, text):
    grid = ExperimentGrid()
    with pytest.raises(UsageError, match=text):
        for key, values in keys:
            grid.add(key, values)


@pytest.mark.parametrize(
    "given, text",
    [
        ({"epochs": -1}, "epochs is a whole number of at least 1; got -1"),
        ({"epochs": 1.5}, "epochs is a whole number of at least 1; got 1.5"),
        ({"steps_per_epoch": 0}, "steps_per_epoch is a whole number of at least 1; got 0"),
        ({"seed": -1}, "seed is a whole number of at least 0; got -1"),
        ({"gamma": "x"}, "gamma is a number; got 'x'"),
        ({"ac_kwargs": {"hidden_sizes": 0}}, "hidden_sizes are the widths"),
        ({"ac_kwargs": {"hidden_sizes": [64, "a"]}}, "hidden_sizes are the widths"),
        ({"ac_kwargs": {"activation": "tanh"}}, "activation is a class of torch.nn"),
    ],
)
def test_an_algorithm_names_an_argument_that_makes_no_sense(tmp_path, given, text):
    import gymnasium

    from mpi_util_spinup import ppo

    with pytest.raises(UsageError, match=text):
        ppo(lambda: gymnasium.make("CartPole-v1"), logger_kwargs={"output_dir": tmp_path}, **given)


def test_an_algorithm_takes_numpys_numbers_and_no_iterations(tmp_path):
    import gymnasium

    from mpi_util_spinup import ppo, trpo

    env, log = functools.partial(gymnasium.make, "CartPole-v1"), {"output_dir": tmp_path}
    given = {"epochs": np.int64(1), "steps_per_epoch": 30, "train_v_iters": 0, "max_ep_len": math.inf}
    ppo(env, train_pi_iters=0, ac_kwargs={"hidden_sizes": np.array([8, 8])}, logger_kwargs=log, **given)
    trpo(env, cg_iters=0, backtrack_iters=0, logger_kwargs=log, **given)


def test_runs_that_make_no_sense(tmp_path, monkeypatch):
    grid = ExperimentGrid("g")
    grid.add("lr", [0.1, "0,1"])
    for arguments, text in [
        ({"thunk": max}, "2 variants have the folder .*g_lr0-1_s0; make their names differ"),
        ({"thunk": "nothing"}, "'nothing' is not a parameter; they are lr"),
        ({"thunk": 3}, "thunk must be a function"),
        ({"thunk": max, "num_cpu": 0}, "num_cpu, if not 'auto', is a whole number of at least 1; got 0"),
        ({"thunk": max, "max_parallel": 0}, "max_parallel is a whole number of at least 1; got 0"),
    ]:
        with pytest.raises(UsageError, match=text):
            grid.run(data_dir=tmp_path, **arguments)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    made.clear()
    with pytest.raises(UsageError, match="without mpiexec"):
        grid.run(max)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    made.clear()


def test_auto_shares_the_cores(tmp_path):
    for at_once, n in [(1, usable_cores()), (2, max(1, usable_cores() // 2)), (1000, 1)]:
        assert Experiment("e", max, "auto", {"output_dir": str(tmp_path)}, {}, at_once).num_cpu == n


def test_a_folder_that_cannot_be_made_is_a_failed_run(tmp_path, capsys):
    (tmp_path / "file").touch()
    grid = ExperimentGrid("g")
    grid.add("seed", [0, 1])
    with pytest.raises(ExperimentError, match="2 of 2 experiments failed: g_s0, g_s1") as caught:
        grid.run(max, data_dir=tmp_path / "file")
    assert [result.status for result in caught.value.results] == ["failed", "failed"]
    assert "Not a directory" in capsys.readouterr().err


def test_a_run_whose_end_cannot_be_noted_is_done_nevertheless(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("mpi_util_spinup.experiment.replace_file", full)
    experiment = Experiment("e", dict, 1, {"output_dir": str(tmp_path / "e")}, {}, 1)
    (result,) = Schedule([experiment]).run()
    assert result.status == "done" and not experiment.finished() and not list((tmp_path / "e").iterdir())


# ---- scripts


@pytest.mark.slow
@pytest.mark.left_out(mpi="openmpi")  # an experiment's ranks are started as any others
def test_a_grid_goes_on_after_a_failure(tmp_path, mpi):
    first = script(tmp_path, "grid", 2, 2, status=1, mpi=mpi)
    name = "try_ac-hid32-32"
    assert statuses(first.out) == {f"{name}_s0": "done", f"{name}_s1": "failed (1)", f"{name}_s2": "done"}
    assert f"{name}_s1 | RuntimeError: bad luck" in first.out and first.out.count("Traceback") == 1
    assert "ExperimentError: 1 of 3 experiments failed: try_ac-hid32-32_s1" in first.err
    assert "Traceback" not in first.err
    for seed in (0, 2):
        folder = tmp_path / "data" / name / f"{name}_s{seed}"
        row = {"AverageX": f"{10 * seed + 0.5}", "StdX": "0.5", "MaxX": f"{10 * seed + 1.0}", "MinX": f"{10.0 * seed}"}
        assert cells(folder / "progress.txt") == [row | {"Sum": "1.0"}]
        assert f"seed {seed} on 2 ranks" in (folder / "output.txt").read_text()
        config = json.loads((folder / "config.json").read_text())
        assert config["exp_name"] == name and config["ac_kwargs"] == {"hidden_sizes": [32, 32]}
        assert json.loads((folder / "finished.json").read_text())["config"]["seed"] == seed
    again = script(tmp_path, "grid", 2, 1, status=1, mpi=mpi)
    assert statuses(again.out) == {f"{name}_s0": "done before", f"{name}_s1": "failed (1)", f"{name}_s2": "done before"}
    assert again.err.count("RuntimeError: bad luck\n") == 1  # one at a time, a run prints to our output
    marker = tmp_path / "data" / name / f"{name}_s0" / "finished.json"
    marker.write_text(marker.read_text().replace('"lr": 0.5', '"lr": 0.25'))
    assert statuses(script(tmp_path, "grid", 2, 3, status=1, mpi=mpi).out)[f"{name}_s0"] == "done"
    assert (marker.parent / "progress.txt.1").exists()


@pytest.mark.slow
def test_a_grid_runs_again_what_has_changed(tmp_path):
    program = tmp_path / "grid.py"
    program.write_text(
        "import sys\nfrom mpi_util_spinup.run_utils import ExperimentGrid\n"
        "def made():\n    return 'version 1'\n"
        "def thunk(logger_kwargs, seed, make):\n    print(make())\n"
        "if __name__ == '__main__':\n    grid = ExperimentGrid('g')\n    grid.add('seed', [0])\n"
        "    grid.add('make', [made])\n"
        "    grid.run(thunk, redo=len(sys.argv) > 1)\n"
    )
    command = [sys.executable, program]
    seen = [statuses(run([*command, *more], 60, cwd=tmp_path).out)["g_s0"] for more in ([], [], ["redo"])]
    assert seen == ["done", "done before", "done"]
    program.write_text(program.read_text().replace("version 1", "version 2"))
    again = run(command, 60, cwd=tmp_path)
    assert "version 2" in again.out and not list(tmp_path.rglob("*.job"))
    assert statuses(again.out) == {"g_s0": "done"}


@pytest.mark.slow
def test_single_experiments(tmp_path):
    finished = script(tmp_path, "call", 2, 1)
    assert "done data/cart/cart_s3\n" in finished.out
    assert cells(tmp_path / "data/cart/cart_s3/progress.txt")[0]["ObsDim"] == "4"
    assert "caught: experiment cart_s4 failed with status 1" in finished.out
    assert "closure 7\n" in finished.out


GYM = """
class Env:
    observation_space = 7

    def reset(self, seed=None):
        self.t = 0
        return [0.5, self.t]

    def step(self, action):
        assert self.t < 3, "it had ended"
        self.t += 1
        return [0.5, self.t], 1.0, self.t == 3, {}

def make(name):
    assert name == "Old-v0"
    return Env()
"""
GYM_26 = """
import sys

import old

class Env(old.Env):
    def reset(self, seed=None):
        return super().reset(), {}

    def step(self, action):
        obs, rew, done, info = super().step(action)
        return obs, rew, False, done, info

class StepAPICompatibility(Env):
    def __init__(self, env, output_truncation_bool=True):
        assert not output_truncation_bool
        self.env = env

    def reset(self, seed=None):
        return self.env.reset(seed)

    def step(self, action):
        obs, rew, terminated, truncated, info = self.env.step(action)
        return obs, rew, terminated or truncated, info | {"TimeLimit.truncated": truncated}

wrappers = sys.modules["gym"]

def make(name, apply_api_compatibility=None, disable_env_checker=None):
    assert name == "Old-v0" and disable_env_checker
    return Env()
"""
ALGORITHM = """
import gym

def play(env_fn, logger_kwargs, seed):
    from mpi_util_spinup.logx import EpochLogger

    env = env_fn()
    o, d, steps = env.reset(), False, 0
    while not d:
        assert o == [0.5, steps]
        o, r, d, info = env.step(0)
        steps += r
    print(steps, "steps", env.observation_space, info)
    EpochLogger(**logger_kwargs).save_state({"env": env})
"""
CALL = """
from mpi_util_spinup.run_utils import call_experiment
from algorithm import play

call_experiment("old", play, env_name="Old-v0", data_dir="data")
"""


def test_an_algorithm_that_imports_gym_gets_an_environment_of_gyms_api(tmp_path):
    for name, content in {"old": GYM, "gym": GYM, "algorithm": ALGORITHM, "call": CALL}.items():
        (tmp_path / f"{name}.py").write_text(content)
    for content, info in (GYM, "{}"), (GYM_26, "{'TimeLimit.truncated': True}"):
        (tmp_path / "gym.py").write_text(content)
        finished = run([sys.executable, "call.py"], 60, cwd=tmp_path)
        assert finished.status == 0 and f"3.0 steps 7 {info}\n" in finished.out, finished.err
        env = "import pickle; e = pickle.load(open('data/old/old_s0/vars.pkl', 'rb'))['env']; "
        env += "from mpi_util_spinup.play_policy import run_policy; run_policy(e, lambda obs: 0, num_episodes=2)"
        played = run([sys.executable, "-c", env], 60, {"PYTHONPATH": f"{ROOT}:."}, cwd=tmp_path)
        assert played.out.count("EpRet 3.000 \t EpLen 3") == 2, played.err


def test_an_environment_that_the_script_registers(tmp_path):
    finished = script(tmp_path, "registered", 1, 1)
    assert cells(tmp_path / "data/registered/registered_s6/progress.txt")[0]["ObsDim"] == "5"
    assert '"env_name": "Mine-v0"' in finished.out


@pytest.mark.slow
def test_without_cloudpickle_one_line_says_what_to_install(tmp_path):
    finished = script(tmp_path, "named", 1, 1, "without_cloudpickle", status=2)
    assert finished.err.endswith("this needs cloudpickle, which is not installed: pip install cloudpickle\n")


@pytest.mark.slow
def test_a_script_needs_no_guard_around_its_start(tmp_path):
    unguarded = SCRIPT.read_text().replace('if __name__ == "__main__":', "if True:")
    (tmp_path / "unguarded.py").write_text(unguarded)
    finished = run([sys.executable, "unguarded.py", "named", 1, 1], 60, cwd=tmp_path)
    assert finished.status == 0 and statuses(finished.out) == {"try_s0": "done"}


def test_a_grid_without_values_is_one_line_and_status_2(tmp_path):
    finished = script(tmp_path, "empty", 1, 1, status=2)
    assert re.fullmatch(r"mpi_util: \S+:\d+: UsageError: ExperimentGrid: nothing to run; add .*\n", finished.err)
    assert finished.out == ""


@pytest.mark.slow
@pytest.mark.left_out(mpi="openmpi", num_cpu=1)
@pytest.mark.parametrize("num_cpu, signum", [(2, signal.SIGINT), (1, signal.SIGTERM), (2, signal.SIGKILL)])
def test_a_signal_stops_all_and_leaves_no_process_and_no_file(tmp_path, temporary, mpi, num_cpu, signum):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TEST_GRID": str(tmp_path), **mpi_environment(mpi)}
    environment["TMPDIR"] = str(temporary)
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "wait", str(num_cpu), "2"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("waiting-*"))) < 2 * num_cpu and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(alive(tmp_path)) > 2 * num_cpu
    process.send_signal(signum)
    out, err = process.communicate(timeout=20)
    if signum == signal.SIGKILL:
        while alive(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
    else:
        assert process.returncode == 128 + signum, err
        assert statuses(out) == {"try_s0": "stopped", "try_s1": "stopped", "try_s2": "not run"}
    assert alive(tmp_path) == []
    assert not list(tmp_path.rglob("finished.json"))
    while list(temporary.iterdir()) and time.monotonic() < deadline:  # the jobs' guards outlive a killed process
        time.sleep(0.05)
    assert not list(temporary.iterdir())


@pytest.fixture
def temporary():
    """A folder for temporary files, with a path short enough for Open MPI's sockets."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def alive(folder):
    """The processes that have been started with this folder in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TEST_GRID={folder}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
