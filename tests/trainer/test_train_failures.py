"""train.py where environments and runs fail: segments resume to the same bits, episodes run again, NaN is named."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, mpi_environment
from training import FRAMEWORKS, rows, train, wait_for_row

from policies.actor import Actor, init_params
from policies.scaler import Scaler
from trainer import rollout
from trainer.collect import SegmentCollector
from trainer.config import Config
from trainer.control import BadData, Control
from trainer.rollout import Episode, Runner
from trainer.run import build_envs
from trainer.run_folder import RunFolder, load

WALK = "tests.envs:Walk-v0"
BRIEF = ["--epochs", 1, "--vf_epochs", 1]
SEGMENTS = ["--batch_steps", 240, "--num_envs", 6, *BRIEF]
END = ["--total_steps", 240 * 24]
OPEN = ["--lr_schedule", "constant", "--std_fall", 0]  # nothing depends on the end
EPISODES = ["-b", 6, *BRIEF]
TRIALS = ["--eval_every", 700, "--eval_episodes", 2]


def results(folder, without=()):
    """Policy, rows, and everything of the checkpoint but times."""
    arrays, notes = load(folder / "checkpoint.safetensors")
    notes["scalars"].pop("time")
    bits = {name: array.tobytes() for name, array in arrays.items()}
    table = [{k: v for k, v in row.items() if k not in without} for row in rows(folder)]
    return (folder / "policy.safetensors").read_bytes(), table, bits, notes


def start(*arguments, mpi):
    """train.py, without an end."""
    command = [sys.executable, "train.py", *map(str, arguments)]
    env = {**os.environ, **mpi_environment(mpi)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "mpi", "more"),
    [
        (WALK, "mpich", OPEN), ("CartPole-v1", "openmpi", OPEN),
        ("Hopper-v4", "mpich", END), (WALK, "mpich", [*OPEN, "--overlap", "--rew_scale", "returns"]),
    ],
    indirect=["mpi"],
)  # fmt: skip
def test_segments_that_were_killed_go_on_to_the_same_bits(tmp_path, env, mpi, more):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(env, *SEGMENTS, *more, *END, "--run_dir", whole)
    lengths, done = [], 0
    ways = [([env, *SEGMENTS, *more, "--run_dir", parts], 2, signal.SIGTERM), (["--resume", parts], 3, signal.SIGINT)]
    ways.append((["--resume", parts], 4, signal.SIGKILL))
    for arguments, n, signum in ways:
        process = start(*arguments, "--nprocs", n, mpi=mpi)
        wait_for_row(process, done + 3)
        process.send_signal(signum)
        _, err = process.communicate(timeout=30)
        assert "replayed" not in err
        saved, _ = load(parts / "checkpoint.safetensors")
        done = int(saved["iteration"][0])
        lengths += saved["episodes/at"][:, 1].tolist()
    assert 3 <= done < 24 and sum(n > 0 for n in lengths) > 9  # most episodes were under way
    train("--resume", parts, *END, "--nprocs", 1)
    expected, found = results(whole), results(parts)
    assert all(a == b for a, b in zip(expected, found)), [k for k in expected[2] if expected[2][k] != found[2].get(k)]


@pytest.mark.slow
def test_episodes_that_cannot_be_replayed_are_reported(tmp_path):
    folder = tmp_path / "run"
    train("tests.envs:Moody-v0", *SEGMENTS, "--total_steps", 240, "--run_dir", folder)
    under_way = int((load(folder / "checkpoint.safetensors")[0]["episodes/at"][:, 1] > 0).sum())
    done = train("--resume", folder, "--total_steps", 480, "--nprocs", 2, "--on_env_error", "restart")
    lines = [line for line in done.err.splitlines() if "replayed" in line]
    assert len(lines) == 1 and f"train.py: {under_way} of 6 environments tests.envs:Moody-v0 " in lines[0]
    assert [row.get("EnvRestarts") for row in rows(folder)] == ["", "0"]


@pytest.mark.slow_unless(n=1, way=[EPISODES, SEGMENTS])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("way", [EPISODES, SEGMENTS], ids=["episodes", "segments"])
def test_an_environment_that_fails_is_made_again(tmp_path, way, n):
    arguments = [WALK, *way, *TRIALS, "--total_steps", 2000]
    train(*arguments, "--run_dir", tmp_path / "calm")
    flaky = tmp_path / "flaky"
    flaky.mkdir()
    arguments += ["--on_env_error", "restart", "--nprocs", n, "--run_dir", tmp_path / "run"]
    done = train(*arguments, env={"FLAKY": str(flaky)})
    failed = {path.name for path in flaky.iterdir()}
    assert failed == {"step", "init", "reset", "evaluation"}
    lines = [line for line in done.err.splitlines() if line.startswith("train.py: episode ")]
    assert len(lines) == 4 and all(line.endswith(" failed; run again in a new environment") for line in lines)
    assert {line.split()[4] for line in lines} == failed and lines[0].split()[3] == "RuntimeError:"
    assert sum(int(row["EnvRestarts"]) for row in rows(tmp_path / "run")) == 4
    expected, found = results(tmp_path / "calm")[:3], results(tmp_path / "run", ["EnvRestarts"])[:3]
    assert expected == found, [name for name, bits in expected[2].items() if found[2].get(name) != bits]


@pytest.mark.slow
@pytest.mark.parametrize("way", [EPISODES, SEGMENTS], ids=["episodes", "segments"])
def test_an_episode_that_fails_three_times_in_a_row_ends_the_run(tmp_path, way):
    arguments = ["tests.envs:Broken-v0", *way, "--on_env_error", "restart", "--run_dir", tmp_path / "run"]
    done = train(*arguments, status=1)
    lines = done.err.splitlines()
    again = [
        line for line in lines if line.endswith("RuntimeError: the simulator fell over; run again in a new environment")
    ]
    assert len(again) == 2 and again[0] == again[1]
    assert done.err.count("Traceback") == 1 and lines[-1] == "RuntimeError: the simulator fell over"


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_an_environment_that_ends_the_program_is_one_that_fails(tmp_path, n):
    """As when the window of a viewer is closed: with status 0 a script would take the run for done."""
    arguments = ["tests.envs:Broken-v0", *EPISODES, "--run_dir", tmp_path / "run", "--nprocs", n]
    done = train(*arguments, status=1, env={"BROKEN": "step SystemExit"})
    assert "\nRuntimeError: the environment calls sys.exit\n" in done.err


def a_runner(env: str, weight: float = 0.01, **settings) -> Runner:
    """A runner of this environment, with this weight everywhere in the last layer."""
    config = Config(env=env, **settings)
    envs, spec = build_envs(config)
    params = init_params(spec, np.random.default_rng(0))
    params["policy/2/weight"].fill(weight)
    return Runner(envs[0], Actor(spec, params), Scaler(spec.obs_dim), config, Control(1.0))


def fail(action):
    """A step of an environment that has failed."""
    raise RuntimeError(f"no step\nfor {action.shape}")


@pytest.mark.slow
def test_failures_in_one_episode_are_no_failures_in_a_row(capsys):
    calm, runner = a_runner(WALK), a_runner(WALK, on_env_error="restart")
    calm.start(Episode((4, 2)))
    runner.start(Episode((4, 2)))
    for _ in range(4):
        runner.env.step = fail
        expected, found = calm.run(5)[0], runner.run(5)[0]
        assert all(np.array_equal(expected[key], found[key]) for key in expected if key != "work")
        assert found["work"][0, 1] == 1
    line = "train.py: episode 4/2: RuntimeError: no step for (2,); run again in a new environment\n"
    assert capsys.readouterr().err == 4 * line


@pytest.mark.slow
def test_what_cannot_be_replayed_gives_way_to_the_next():
    runner = a_runner("tests.envs:Moody-v0", on_env_error="restart", batch_steps=5, num_envs=1)
    collector = SegmentCollector(runner.config, runner.control, runner.actor, {0: runner}, False, {})
    for number in (0, 1):
        (batch,) = collector.collect().values()
        assert len(batch["adv"]) == 5 and collector.episodes[0].key == (0, number)
        runner.env.step = fail


@pytest.mark.parametrize(
    "bad, text",
    [
        ("reward nan", "step 2: reward is nan"),
        ("reward -inf", "step 2: reward is -inf"),
        ("reward 1e300", "step 0: advantage is inf"),
        ("observation nan", "step 3: observation[1] is nan"),
        ("observation 1e300", "step 3: observation[1] is inf"),
        ("reset inf", "step 0: observation[1] is inf"),
        ("crash nan", "step 3: observation[1] is nan"),
    ],
)
@pytest.mark.parametrize("n_steps", [None, 2])
@pytest.mark.filterwarnings("error")
def test_what_is_not_finite_is_named(monkeypatch, bad, text, n_steps):
    monkeypatch.setenv("NOT_FINITE", bad)
    runner = a_runner("tests.envs:NotFinite-v0", on_env_error="restart")
    text = text.replace("step 0: adv", "step 2: adv") if n_steps else text  # of that segment
    with pytest.raises(BadData) as raised:
        for i in range(100):
            runner.start(Episode((7, i)))
            while not runner.run(n_steps)[1]:
                pass
    assert str(raised.value) == f"episode 7/{i}, {text}"


def test_an_action_that_is_not_finite_is_named():
    runner = a_runner(WALK, weight=np.inf)
    runner.start(Episode((3,)))
    with pytest.raises(BadData, match=r"^episode 3, step \d+: action\[[01]\] is (nan|-?inf)$"):
        runner.run()


def test_an_endless_episode_is_stopped_where_it_is_not_finite():
    runner = a_runner(WALK, weight=np.inf)
    runner.env.step = lambda action: (np.zeros(2), 0.0, False, False, {})
    runner.start(Episode((3,)))
    with pytest.raises(BadData, match=r"^episode 3, step 0: action"):
        runner.run()


def test_an_evaluation_keeps_few_rows_of_a_long_episode(monkeypatch):
    monkeypatch.setattr(rollout, "FIRST_ROWS", 16)
    whole, few = a_runner(WALK), a_runner(WALK)
    few = Runner(few.env, few.actor, few.scaler, few.config, few.control, training=False)
    few._stream = whole._stream
    for i in range(5):
        for runner in (whole, few):
            runner.start(Episode((i,)))
        expected, found = whole.run()[0], few.run()[0]
        assert set(found) == {"ep_ret", "ep_len", "work"} and found["ep_ret"] == expected["ep_ret"]
        assert found["ep_len"] == expected["ep_len"] == len(expected["obs"]) and np.array_equal(
            few._obs[0], whole._obs[0]
        )
    assert len(few._obs) == 16 < len(whole._obs)
    few.start(Episode((9,)))
    step, steps = few.env.step, iter(range(100))
    few.env.step = lambda action: (*step(action)[:1], np.nan if next(steps) == 17 else 0.0, False, False, {})
    with pytest.raises(BadData, match=r"^episode 9, step 17: reward is nan"):
        few.run()


def test_of_a_very_long_episode_no_actions_are_kept(monkeypatch):
    monkeypatch.setattr(rollout, "MOST_REPLAYED", 9)
    runner = a_runner(WALK)
    for steps, kept in ((5, 5), (3, 9), (4, 0), (5, 5)):
        if steps == 5:
            runner.start(Episode((0, 0)))
        runner.run(steps)
        saved = runner.episode.pack(runner.actor.spec)
        assert len(saved["episodes/act"]) == len(saved["episodes/rew"]) == kept
        other = a_runner(WALK)
        assert other.start(Episode.unpack(saved, 0)) == (kept > 0)
        if kept:
            expected, found = runner.run(1)[0], other.run(1)[0]
            assert all(np.array_equal(expected[key], found[key]) for key in expected if key != "work")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Folder of a run of one iteration."""
    folder = tmp_path_factory.mktemp("good") / "run"
    train(
        "tests.envs:NotFinite-v0",
        "--batch_steps",
        42,
        "--num_envs",
        6,
        *BRIEF,
        "--total_steps",
        42,
        "--run_dir",
        folder,
    )
    return folder


@pytest.mark.slow_if(bad="reward 1e30")
@pytest.mark.parametrize(
    "bad, text",
    [
        ("crash nan", r"episode \d/\d+, step 3: observation\[1\] is nan"),
        ("reward 1e30", r"iteration \d+: LossV is (inf|nan) after the update"),
    ],
)
def test_what_is_not_finite_ends_the_run_with_one_line(good, tmp_path, bad, text):
    folder = tmp_path / "run"
    shutil.copytree(good, folder)
    before = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    again = ["--resume", folder, "--total_steps", 2400, "--nprocs", 2, "--trust"]  # as it is a copy
    done = train(*again, env={"NOT_FINITE": bad}, status=1)
    line, _which_rank = done.err.splitlines()
    assert re.fullmatch(f"train.py: {text}", line), line
    assert {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} == before


@pytest.mark.parametrize("name", ["policy/0/weight", "value/adam/v", "scaler/run_m2", "episodes/rew", "policy/updates"])
def test_a_checkpoint_that_is_not_finite_is_named(good, tmp_path, name):
    path = tmp_path / "run" / "checkpoint.safetensors"
    shutil.copytree(good, path.parent)
    arrays, notes = load(path)
    if name in arrays:
        arrays[name].flat[1] = np.nan
    else:
        notes["scalars"][name] = np.nan
    RunFolder(path.parent, new=False).save(path.name, arrays, notes)
    with pytest.raises(ValueError, match=f"^cannot load {path}: {name} in it is not finite$"):
        load(path)
    if name == "policy/0/weight":
        done = train("--resume", path.parent, "--total_steps", 2400, "--nprocs", 2, "--trust", status=2)
        assert done.err == f"train.py: cannot load {path}: {name} in it is not finite\n"


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("option", ["--lr", "--vf_lr"])
def test_an_update_that_diverges_ends_the_run_with_one_line(tmp_path, framework, option):
    folder = tmp_path / "run"
    arguments = [WALK, *SEGMENTS, option, 1e30, "--framework", framework, "--run_dir", folder]
    done = train(*arguments, status=1)
    lines = [line for line in done.err.splitlines() if line.startswith("train.py: ")]
    ends = "train.py: iteration 1: ", "train.py: episode "  # of the update, or of its first action
    assert len(lines) == 1 and lines[0].startswith(ends), done.err
    assert int(load(folder / "checkpoint.safetensors")[0]["iteration"][0]) == 0


@pytest.mark.slow
def test_of_environments_in_step_the_one_that_fails_is_named():
    runners = {e: a_runner(WALK, batch_steps=10, num_envs=2) for e in (0, 1)}
    actor = runners[0].actor
    assert actor._places_agree(8)
    collector = SegmentCollector(runners[0].config, runners[0].control, actor, runners, False, {})
    assert [len(batch["adv"]) for batch in collector.collect().values()] == [5, 5]
    runners[0].env.step = fail
    with pytest.raises(RuntimeError) as raised:
        collector.collect()
    assert raised.value._mpi_util_where["episode"] == "0/0"


@pytest.mark.parametrize("pause, calls", [(0.0, range(1, 30)), (2e-3, [40])])
def test_whether_to_stop_is_asked_before_slow_steps(pause, calls):
    runner, asked = a_runner(WALK), []
    runner.env.step = lambda action: (np.full(2, time.sleep(pause) or 0.0), 0.0, False, False, {})
    runner.start(Episode((0,)))
    batch, _ = runner.run(40, lambda: asked.append(None))
    assert len(batch["adv"]) == 40 and len(asked) in calls


def test_the_seconds_of_a_segment_are_counted_once():
    runners = {e: a_runner(WALK, batch_steps=10, num_envs=2) for e in (0, 1)}
    for runner in runners.values():
        step = runner.env.step
        runner.env.step = lambda action, step=step: (time.sleep(2e-3), step(action))[1]
    collector = SegmentCollector(runner.config, runner.control, runner.actor, runners, False, {})
    work = np.concatenate([batch["work"] for batch in collector.collect().values()])
    seconds, restarts = work.sum(axis=0)
    assert 0.02 < seconds < 0.5 and restarts == 0
    assert work[1:].sum() == 0.0


ODD = """
import os, signal
import gymnasium as gym, numpy as np
class Env(gym.Env):
    observation_space = gym.spaces.Box(-10, 10, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(4, np.float32), {}
    def step(self, a):
        self.t += 1
        return self.obs(), self.rew(), self.t >= 10, False, {}
    def obs(self):
        return np.zeros(4, np.float32)
    def rew(self):
        return 1.0
class OneNumber(Env):
    def obs(self):
        return 1.0
class OneRow(Env):
    def obs(self):
        return np.zeros((1, 4), np.float32)
class NoReward(Env):
    def rew(self):
        return None
class TwoRewards(Env):
    def rew(self):
        return np.ones(2)
class Walks(Env):
    def reset(self, **given):
        os.chdir("/")
        return super().reset(**given)
for kind in (OneNumber, OneRow, NoReward, TwoRewards, Walks):
    gym.register(f"{kind.__name__}-v0", entry_point=kind)
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("OneNumber", "an observation has shape (); its space Box(-10.0, 10.0, (4,), float32)"),
        ("OneRow", "an observation has shape (1, 4); its space Box(-10.0, 10.0, (4,), float32)"),
        ("NoReward", "a reward is None, of class NoneType; it must be a number"),
        ("TwoRewards", "a reward is array([1., 1.]), of class ndarray; it must be a number"),
    ],
)
def test_what_step_gives_is_checked(tmp_path, name, says):
    (tmp_path / "odd.py").write_text(ODD)
    done = train(
        f"odd:{name}-v0", "-n", 100, "--run_dir", tmp_path / "run", status=1, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    )
    assert done.err == f"train.py: {says}\n"


@pytest.mark.parametrize("n", [1, 2])
def test_a_run_closes_its_environments_whose_threads_would_keep_it(tmp_path, n):
    train("tests.envs:Threaded-v0", "-n", 4, "-b", 4, "--eval_every", 50, "--nprocs", n, "--run_dir", tmp_path / "run")


def test_environments_may_share_what_ends_with_the_first_that_is_closed(tmp_path):
    train("tests.envs:Shared-v0", "-n", 4, "-b", 4, "--run_dir", tmp_path / "run")


def test_an_environment_may_go_to_another_folder(tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    command = [sys.executable, ROOT / "train.py", "odd:Walks-v0", "-n", "20", "--run_dir", "a/run", *map(str, BRIEF)]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=60)
    command = [sys.executable, ROOT / "train.py", "--resume", "a/run", "-n", "40"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=60, text=True
    )
    assert "--resume a/run" in done.stdout and load(tmp_path / "a/run/checkpoint.safetensors")[0]["episodes"] >= 40
