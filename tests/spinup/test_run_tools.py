"""What people see of runs: curves, videos, other formats, several seeds, settings by name."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT, run
from training import train

from mpi_util.errors import UsageError
from mpi_util_spinup import plot
from policies.actor import Spec
from trainer.command_line import parse, plain
from trainer.play import load_policy
from trainer.seeds import numbers, run_one


@functools.cache
def draws():
    """Whether MuJoCo can draw here without a display."""
    command = [sys.executable, "-c", "import mujoco; mujoco.GLContext(8, 8).make_current()"]
    return any(run(command, 60, {"MUJOCO_GL": way}).status == 0 for way in ("egl", "osmesa"))


def plotted(*arguments, status=0, cwd=None):
    done = run([sys.executable, "-m", "mpi_util_spinup.plot", *arguments], 120, {"PYTHONPATH": str(ROOT)}, cwd=cwd)
    assert done.status == status, done.out + done.err
    return done


def table(folder, seed=0, nprocs=1, lr=1e-3, tests=False, rows=10, **config):
    """A run's folder with rows that are easy to compute with."""
    folder.mkdir(parents=True)
    config = {"env": "Hopper-v4", "algo": "ppo", "seed": seed, "lr": lr, "nprocs": nprocs} | config
    (folder / "config.json").write_text(json.dumps(config))
    names = ["TotalEnvInteracts", "Time", "AverageEpRet", "AverageTestEpRet", "StepsPerSecond"]
    names += ["RolloutS", "GatherS", "UpdateS", "BcastS"]
    lines = ["\t".join(names)]
    for i in range(1, rows + 1):
        test = 10.0 * i if tests and i % 2 == 0 else "nan"
        cells = [100 * i, i / nprocs, "nan" if i == 1 else i + seed, test, 1000 * nprocs, 0.5 / nprocs, 0.1, 0.2, 0.1]
        lines.append("\t".join(map(str, cells)))
    (folder / "progress.txt").write_text("\n".join(lines) + "\nhalf a r")
    return folder


# ---- curves


def test_seeds_are_one_curve_with_mean_and_spread(tmp_path):
    for seed in (0, 2):
        table(tmp_path / f"a{seed}", seed)
    table(tmp_path / "b", lr=3e-4)
    figure = plot.make_plots([tmp_path])
    (axes,) = figure.axes
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["ppo, lr 0.001 (2 runs)", "ppo, lr 0.0003"] and axes.get_title() == "Hopper-v4"
    first, second = axes.lines
    assert first.get_xdata().tolist() == list(range(200, 1001, 100))
    assert np.allclose(first.get_ydata(), np.arange(2, 11) + 1) and np.allclose(second.get_ydata(), np.arange(2, 11))
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (2.0, 12.0)  # mean +- 1


def test_a_single_run_is_a_smoothed_line_over_its_rows(tmp_path):
    table(tmp_path / "a", seed=7, rows=200)
    (axes,) = plot.make_plots([tmp_path / "a"], smooth=None).axes  # as on the command line
    line, shadow = axes.lines
    raw = np.arange(2, 201) + 7.0
    assert np.allclose(shadow.get_ydata(), raw) and np.allclose(line.get_ydata()[2:-2], raw[2:-2] - 0.5)  # means of 4
    assert shadow.get_alpha() < 0.5 and axes.get_title() == "Hopper-v4, ppo"
    assert axes.xaxis.get_major_formatter()(50_000) == "50k" and axes.xaxis.get_major_formatter()(1e6) == "1M"
    (axes,) = plot.make_plots([tmp_path / "a"]).axes
    assert len(axes.lines) == 1 and not axes.yaxis.get_major_formatter().get_useOffset()


@pytest.mark.parametrize("n, shape", [(1, (1, 1)), (2, (1, 2)), (4, (2, 2)), (5, (2, 3))])
def test_each_environment_has_a_panel_and_the_legend_covers_none(tmp_path, n, shape):
    for i in range(n):
        for seed in (0, 1):
            table(tmp_path / f"{i}-{seed}", seed, env=f"Env{i}-v0", lam=0.9 + i / 100)
    table(tmp_path / "trpo", env="Env0-v0", algo="trpo", lam=0.9)
    for style, width in (("screen", 7.0), ("paper", 3.3)):
        figure = plot.make_plots([tmp_path], style=style)
        drawn = [axes for axes in figure.axes if axes.lines]
        assert [axes.get_title().split(",")[0] for axes in drawn] == [f"Env{i}-v0" for i in range(n)]
        assert figure.axes[0].get_subplotspec().get_gridspec().get_geometry() == shape
        assert {line.get_color() for axes in drawn[1:] for line in axes.lines} <= {
            "C0",
            "C1",
        }  # of a group the same one
        names = {text.get_text() for text in figure.legends[0].get_texts()}
        assert names == {"ppo (2 runs)", "trpo"}  # not lam, which is another one in each environment
        figure.draw_without_rendering()
        legend = figure.legends[0].get_window_extent()
        assert not any(legend.overlaps(axes.get_tightbbox()) for axes in drawn)
        assert n > 1 or figure.get_figwidth() == width


def test_spinning_ups_own_programs_have_curves_and_panels(tmp_path):
    for env in ("CartPole-v1", "Acrobot-v1"):
        for seed in (0, 1):  # they save all their local variables
            own = {"env": None, "env_fn": env, "logger": {"<EpochLogger object>": {"output_dir": f"data/{seed}"}}}
            table(tmp_path / f"{env}{seed}", seed, **own)
    figure = plot.make_plots([tmp_path])
    assert [axes.get_title() for axes in figure.axes] == [f"{e}, ppo (2 runs)" for e in ("Acrobot-v1", "CartPole-v1")]


def test_a_name_in_the_legend_is_all_of_it(tmp_path):
    for name, lr in {"a": 1e-3, "b": 1e-4}.items():
        table(tmp_path / name, lr=lr)
    legend = plot.make_plots([tmp_path / "a", tmp_path / "b"], legend=["A", "B"]).legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["A", "B"]


def test_a_curve_is_in_the_order_of_its_axis(tmp_path):
    columns = {"KL": np.array([0.3, 0.1, np.nan, 0.2]), "Loss": np.array([30.0, 10.0, 5.0, 20.0])}
    assert [each.tolist() for each in plot.Run(tmp_path, columns, {}).curve("KL", "Loss")] == [
        [0.1, 0.2, 0.3], [10.0, 20.0, 30.0]
    ]  # fmt: skip


@pytest.mark.slow
def test_plots_from_the_command_line(tmp_path):
    table(tmp_path / "a")
    done = plotted("a", "--x", "steps", "--smooth", 2, "--out", "c.png", cwd=tmp_path)
    assert done.out == "c.png\n" and (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
    for arguments, problem in {
        ("none",): "none: no progress.txt with rows",
        ("a", "--value", "Nix"): "no column Nix; it has TotalEnvInteracts",
        ("a", "--out", "c.txt"): "ends in .png, .pdf or .svg",
        ("a", "--smooth", 0): "--smooth is a whole number of at least 1",
        ("a", "--legend", "x", "y"): "2 names for 1 folders",
    }.items():
        done = plotted(*arguments, status=2, cwd=tmp_path)
        assert problem in done.err and done.err.count("\n") == 1
    done = plotted("a", "--style", "paper", "--out", "c.pdf", cwd=tmp_path)
    pdf = (tmp_path / "c.pdf").read_bytes()
    assert b"/CIDFontType2" in pdf and b"/Type3" not in pdf  # text stays text
    with pytest.raises(UsageError, match="no run is left"):
        plot.make_plots([tmp_path / "a"], select=["other"])


# ---- a run's screen and files


@pytest.mark.slow
def test_the_last_episodes_are_known_after_a_resume(tmp_path):
    arguments = ["--batch_steps", 64, "--num_envs", 1, "--save_every", 0, "--run_dir", tmp_path / "run"]
    train("Pendulum-v1", *arguments, "--total_steps", 512)  # episodes end after 200 and 400 steps
    again = train("--resume", tmp_path / "run", "--total_steps", 576)
    (row,) = [line for line in again.out.splitlines() if line.startswith("     9 ")]
    assert "nan" not in row and float(row.split()[3].replace(",", "")) < 0 and row.split()[4] == "200"
    with open(tmp_path / "run" / "progress.jsonl", "a") as file:
        file.write("[]\nno row\n")
    train("--resume", tmp_path / "run", "--total_steps", 640)


@pytest.mark.tensorboard
def test_a_run_leaves_a_curve_a_video_and_other_formats(tmp_path):
    folder, deadline = tmp_path / "run", time.monotonic() + 300
    os.environ["MPI_UTIL_CURVE"] = "1"
    try:
        arguments = ["--eval_every", 1000, "--video_every", 1000, "--save_every", 0, "--tensorboard"]
        first = train("Hopper-v4", "--total_steps", "2e3", "--batch_steps", 1000, *arguments, "--run_dir", folder)
        train("--resume", folder, "--total-steps", "3_000", "--nprocs", 2)
    finally:
        os.environ["MPI_UTIL_CURVE"] = "0"
    assert f"  curve:    {folder}/learning_curve.png\n" in first.out
    assert (folder / "learning_curve.png").read_bytes()[:4] == b"\x89PNG"
    rows = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    assert [row["TotalEnvInteracts"] for row in rows] == [1000, 2000, 3000]
    assert list(folder.glob("events.out.tfevents.*"))
    assert not (folder / "curve.log").exists()
    if not draws():  # which is nothing of the run
        assert "cannot draw Hopper-v4 here" in (folder / "video.log").read_text()
        return
    ready = f"  video:    {folder}/videos\n" in first.out
    assert ready or f"  video:    {folder}/videos (not ready yet)\n" in first.out
    import imageio.v2 as imageio

    while not (films := sorted(path for path in (folder / "videos").iterdir() if path.is_file())):
        assert not ready and time.monotonic() < deadline
        time.sleep(0.5)
    assert all(film.suffix == ".mp4" for film in films)
    frame = imageio.get_reader(films[0]).get_data(0)
    assert frame.shape == (480, 480, 3) and frame.std() > 20  # a picture of something
    assert not ready or not list(folder.glob("*.log"))


@pytest.mark.slow
def test_videos_and_their_errors(tmp_path):
    folder = tmp_path / "run"
    train("Hopper-v4", "--total_steps", 1000, "--run_dir", folder)
    film = tmp_path / "h.gif"
    if draws():
        train("--watch", folder, "--video", film)
        assert film.read_bytes()[:3] == b"GIF"
    for arguments, problem in {
        ("--video", tmp_path / "h.avi"): "ends in .mp4 or .gif",
        ("--video", tmp_path / "none" / "h.gif"): f"No such file or directory: '{tmp_path / 'none'}'",
        ("--video", folder / "config.json" / "h.gif"): f"Not a directory: '{folder / 'config.json'}'",
        ("--best",): "has no best.safetensors",
        ("--episodes", 0): "--episodes is 0",
    }.items():
        done = train("--watch", folder, *arguments, status=2)
        assert problem in done.err and done.err.count("\n") == 1
    for renderer, problem in {"disabled": "cannot draw Hopper-v4 here", "nix": "Hopper-v4': invalid value"}.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MUJOCO_GL", renderer)
            done = train("--watch", folder, "--video", film, status=2)
        assert problem in done.err and done.err.count("\n") == 1


@pytest.mark.slow
def test_without_a_display_no_window_is_opened(tmp_path, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    for display in ("", ":77"):
        monkeypatch.setenv("DISPLAY", display)
        done = train("Hopper-v4", "--nprocs", 2, "--render", "--run_dir", tmp_path / "run", status=2)
        assert done.err.count("\n") == 1 and "there is no display" in done.err


@pytest.mark.slow
def test_a_saved_policy_in_three_lines(tmp_path):
    folder = tmp_path / "run"
    train("Hopper-v4", "--total_steps", 1000, "--eval_every", 500, "--run_dir", folder)
    policy = load_policy(folder)
    assert policy.path.name == "best.safetensors" and load_policy(folder, "last").path.name == "policy.safetensors"
    env = policy.make_env()
    obs, _ = env.reset(seed=0)
    action = policy.act(obs)
    assert action.shape == (3,) and np.array_equal(action, policy.act(obs)) and env.action_space.contains(action)
    assert not np.array_equal(action, policy.act(obs, stochastic=True))
    import torch

    outputs = policy.to_torch()(torch.tensor(np.stack([obs, obs]), dtype=torch.float32))
    assert np.allclose(outputs.detach().numpy(), [action, action], atol=1e-6)  # Hopper's range is -1 to 1


# ---- settings by name


def test_numbers_as_people_write_them(capsys):
    config = parse(
        ["Hopper-v4", "--total-steps=1e6", "--batch-steps", "1_000", "--nprocs", "auto", "--env-kwargs", "{}"]
    )
    assert (config.total_steps, config.batch_steps) == (1_000_000, 1000) and config.nprocs >= 1
    assert plain(["--a-b", "c-d", "-n", "--x-y=a-b"]) == ["--a_b", "c-d", "-n", "--x_y=a-b"]
    assert numbers("0-2,7") == [0, 1, 2, 7]
    for arguments, problem in [
        (["--total_steps", "1.5"], "'1.5' is not a whole number"),
        (["--preset", "atarii"], "argument --preset: invalid choice: 'atarii'"),
        (["--preset", "atari", "--algo", "trpo"], "--preset atari is for --algo ppo"),
        (["--resume", "x", "--preset", "atari"], "--preset cannot change on --resume; leave it out"),
        (["--name", "a/b"], "give it without /"),
        (["--name", "a", "--run_dir", "b"], "give one of them"),
    ]:
        with pytest.raises(SystemExit):
            parse(["Hopper-v4", *arguments])
        assert problem in capsys.readouterr().err


def test_a_preset_gives_way_to_the_options_beside_it():
    config = parse(["ALE/Pong-v5", "--preset", "atari", "--epochs", "3"])
    assert (config.batch_steps, config.lr, config.lr_schedule, config.lam) == (1024, 2.5e-4, "constant", 0.95)
    assert (config.epochs, config.total_steps) == (3, 10_000_000)
    config = parse(["ALE/Pong-v5", "--preset", "atari", "-b", "4", "--minibatch_rows", "100"])
    assert (config.batch_size, config.batch_steps) == (4, None)
    assert (config.minibatches, config.minibatch_rows) == (0, 100)


def test_lambda_and_deviation_follow_the_number_of_action_components():
    def fitted(components, *given, discrete=False):
        return parse(["Env-v0", *given]).fitted(Spec(5, components, discrete, (8,), (8,)))

    def lam(*given, **more):
        return fitted(*given, **more).lam

    assert [fitted(n).log_std for n in (1, 2, 4, 5, 17)] == [0, -0.5, -0.5, -1, -1]
    assert [fitted(n).std_fall for n in (1, 2, 4, 5, 17)] == [2.5, 3, 3, 2.5, 2.5]
    assert fitted(6, "--log_std", "-0.5").std_fall == 3 and fitted(6, "--log_std", "-4").std_fall == 0
    assert fitted(1, "--log_std", "10").std_fall == 10  # the most that can be given
    assert fitted(6, "--std_fall", "1").std_fall == 1 and fitted(6, "--algo", "trpo").std_fall == 0
    assert fitted(1, "--log_std", "-2").log_std == -2 and fitted(1, "--algo", "trpo").log_std == -0.5
    assert [lam(n) for n in (1, 4)] == [0.95] * 2 == [lam(17, discrete=True), lam(17, "--algo", "trpo")]
    assert [lam(n) for n in (6, 8, 17, 400)] == pytest.approx([0.925, 0.9, 0.8, 0.8]) and lam(17, "--lam", "0") == 0.0


# ---- several seeds


@pytest.mark.slow
def test_several_seeds_go_on_after_an_interruption(tmp_path):
    command = [sys.executable, ROOT / "train.py", "Hopper-v4", "--seeds", "0-1", "--total_steps", 20000]
    command += ["--save_every", 0]
    process = subprocess.Popen(list(map(str, command)), cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    folder = tmp_path / "runs" / "Hopper-v4" / "ppo-s0"
    until = time.monotonic() + 60
    while not (folder / "checkpoint-1.safetensors").exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and re.search(r"-s0 +stopped", out) and re.search(r"-s1 +not run", out)
    stopped = len((folder / "progress.txt").read_text().splitlines()) - 1
    assert 0 < stopped < 10
    done = run([*command, "--lr", 0.5], 60, cwd=tmp_path)
    assert done.status == 1 and "ppo-s0 holds a run with other arguments; remove it, or give another --name" in done.err
    assert "train.py: 1 of 2 experiments failed: ppo-s0\n" in done.err
    shutil.rmtree(tmp_path / "runs" / "Hopper-v4" / "ppo-s1")
    done = run(command, 120, cwd=tmp_path)
    assert done.status == 0 and f"--resume {folder}" in done.out, done.err
    assert done.out.endswith("mpi_util_spinup.plot runs/Hopper-v4/ppo-s\n")
    assert len((folder / "progress.txt").read_text().splitlines()) == 11


def test_a_seed_goes_on_at_the_hosts_that_its_command_names(tmp_path, monkeypatch):
    words = ("Hopper-v4", "--hosts", "h1:2,h2:2", "--nprocs", "3", "--log_dir", "logs")
    (tmp_path / "seeds.json").write_text(json.dumps([*words, "--seed", "3"]))
    (tmp_path / "checkpoint.safetensors").touch()
    monkeypatch.setattr(os, "execv", lambda _, command: monkeypatch.setattr(sys, "argv", command))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    run_one("train.py", words, 3, {"output_dir": str(tmp_path)})
    assert sys.argv[2:] == ["--resume", str(tmp_path), "--nprocs=3", "--hosts=h1:2,h2:2", "--log_dir=logs"]


@pytest.mark.slow
def test_several_seeds_of_train_py(tmp_path):
    done = run([sys.executable, ROOT / "train.py", "Hopper-v4", "-n", 8, "-b", 8, "--seeds", "3-4"], 60, cwd=tmp_path)
    assert done.status == 0 and done.out.startswith("2 runs: --seed 3 4\n"), done.err
    assert {str(path.parent) for path in tmp_path.rglob("policy.safetensors")} == {
        f"{tmp_path}/runs/Hopper-v4/{name}" for name in ("ppo-s3", "ppo-s4")
    }
    assert done.out.endswith("plot runs/Hopper-v4/ppo-s\n")
    for arguments, problem in {
        ("--seeds=x",): "invalid numbers value: 'x'; --seeds takes 0-4 or 0,1,7",
        ("--seeds", "4-3"): "--seeds takes 0-4 or 0,1,7",
        ("--seeds", "1-2-3"): "--seeds takes 0-4 or 0,1,7",
        ("--seeds",): "--seeds takes 0-4 or 0,1,7",
        ("--seeds", "0-1", "--name"): "argument --name: expected one argument",
        ("--seeds", "0-1", "--seed=7"): "leave out --resume, --run_dir and --seed",
        ("--seeds", "0-1", "--run_dir", "x"): "leave out --resume, --run_dir and --seed",
        (
            "--seeds",
            "0-1",
            "--total_stepz",
            "9",
        ): "unrecognized arguments: --total_stepz 9; did you mean --total_steps? (see --help)",
    }.items():
        done = run([sys.executable, ROOT / "train.py", "Hopper-v4", *arguments], 60, cwd=tmp_path)
        assert done.status == 2 and problem in done.err and done.err.count("\n") == 1


@pytest.mark.slow
def test_several_seeds_go_on_when_nobody_reads_what_they_print(tmp_path):
    program = [sys.executable, str(ROOT / "train.py"), *["Hopper-v4", "-n", "8", "-b", "8", "--seeds", "3-4"]]
    pipe = subprocess.Popen(["head", "-n", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    done = subprocess.run(program, cwd=tmp_path, stdout=pipe.stdin, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done
    assert pipe.communicate()[0] == b"2 runs: --seed 3 4\n"
    assert len([*tmp_path.rglob("policy.safetensors")]) == 2


@pytest.mark.slow
def test_a_run_does_not_need_its_standard_output(tmp_path):
    """Nobody reads it, it is closed, it takes ASCII alone."""
    work = f"{sys.executable} {ROOT}/train.py CartPole-v1 --total_steps 80 --batch_steps 40 --num_envs 2 --nprocs 2"
    for command in (
        f"{work} --run_dir closed >&-",
        f"PYTHONIOENCODING=ascii {work} --run_dir fähig",
        f"{sys.executable} {ROOT}/train.py --watch closed --no_window --episodes 3 | head -n 1 | grep -q weights",
        f"{sys.executable} {ROOT}/train.py --watch closed --no_window --episodes 3 > /dev/full",
    ):
        done = run(["bash", "-c", f"set -o pipefail; {command}"], 60, cwd=tmp_path)
        assert (done.status, done.err) == (0, ""), (command, done)
    assert {path.parent.name for path in tmp_path.rglob("policy.safetensors")} == {"closed", "fähig"}


@pytest.mark.slow
def test_seeds_have_the_folders_of_single_runs(tmp_path):
    command = [sys.executable, ROOT / "train.py", "Hopper-v4", "-n", 1, "-b", 1, "--name", "X"]
    for arguments in (("--seeds=0",), ("--seed", 1), ("--seeds", "0,2")):  # the first is not repeated
        done = run([*command, *arguments], 60, cwd=tmp_path)
        assert done.status == 0, done.err
    assert "X-s0: done before, in runs/Hopper-v4/X-s0" in done.out
    assert sorted(os.listdir(tmp_path / "runs" / "Hopper-v4")) == ["X-s0", "X-s1", "X-s2"]
    played = run([sys.executable, ROOT / "train.py", "--watch=runs/Hopper-v4/X-s2", "--episodes", 1], 60, cwd=tmp_path)
    assert played.status == 0 and played.out.splitlines()[-1].startswith("episode 1: return "), played


def test_plot_without_matplotlib_is_one_line(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError('none', name='matplotlib')")
    table(tmp_path / "run")
    done = run([sys.executable, "-m", "mpi_util_spinup.plot", tmp_path / "run"], 60, cwd=tmp_path)
    assert done.status == 2 and done.err.count("\n") == 1
    assert done.err.startswith(
        "mpi_util_spinup.plot: this needs matplotlib, which is not installed: pip install matplotlib "
    )


@pytest.mark.slow
def test_an_environment_in_the_users_folder_is_found(tmp_path):
    (tmp_path / "myenvs.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Mine-v0', 'gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=50)\n"
    )
    command = [sys.executable, ROOT / "train.py", "myenvs:Mine-v0", "-n", 8, "-b", 8, "--nprocs", 2]
    done = run(command, 60, cwd=tmp_path)
    assert done.status == 0, done.err


ENVS = """
import gymnasium
import numpy as np


class Parts(gymnasium.Env):
    box = gymnasium.spaces.Box(-1, 1, (2, 2))
    observation_space = gymnasium.spaces.Dict({"a": box, "b": gymnasium.spaces.Discrete(3)})

    def __init__(self, kind="discrete", n=3):
        nvec = gymnasium.spaces.MultiDiscrete([[2, n]], start=[[0, 5]])
        self.action_space = nvec if kind == "discrete" else gymnasium.spaces.MultiBinary(n)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"a": np.zeros((2, 2), np.float32), "b": 0}, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.reset()[0], float(action.sum()), False, False, {}


class Image(Parts):
    observation_space = gymnasium.spaces.Box(0, 255, (4, 5, 3), np.uint8)

    def reset(self, **_):
        return np.zeros((4, 5, 3), np.uint8), {}


gymnasium.register("Parts-v0", Parts, max_episode_steps=20)
gymnasium.register("Image-v0", Image, max_episode_steps=20)


def half(env):
    return gymnasium.wrappers.TransformReward(env, lambda rew: rew / 2)
"""


@pytest.mark.slow
def test_spaces_of_parts_images_and_wrappers(tmp_path):
    (tmp_path / "parts.py").write_text(ENVS)

    def ran(*arguments, status=0):
        command = [sys.executable, ROOT / "train.py", *arguments, "-n", 8, "-b", 8, "--run_dir", tmp_path / "run"]
        done = run(command, 60, cwd=tmp_path)
        assert done.status == status, done.err
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return done

    def returned(done):
        return float(next(line for line in done.out.splitlines() if line.startswith("     1 ")).split()[3])

    whole = returned(ran("parts:Parts-v0", "--nprocs", 2))
    assert 100 < whole < 160  # 20 steps of 5 to 8
    assert returned(ran("parts:Parts-v0", "--env_wrappers", "parts:half,parts:half")) == pytest.approx(
        whole / 4, abs=0.1
    )
    assert 0 < returned(ran("parts:Parts-v0", "--env_kwargs", '{"kind": "binary"}')) < 60
    assert "shape (4, 5, 3) are flattened to 60 numbers" in ran("parts:Image-v0", "--nprocs", 2).out
    large = ran("parts:Parts-v0", "--env_kwargs", '{"n": 600}', status=2)
    assert "1024 combinations at most" in large.err and large.err.count("\n") == 1
    wrong = ran("parts:Parts-v0", "--env_wrappers", "parts:nix", status=2)
    assert "--env_wrappers parts:nix: " in wrong.err and wrong.err.count("\n") == 1
