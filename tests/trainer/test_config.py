"""train.py --config FILE: settings from TOML, from JSON, and from a run's own config.json."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import mpi_util
from trainer.command_line import parse
from trainer.config import Config
from trainer.run_folder import sign

TOML = pytest.mark.skipif(sys.version_info < (3, 11), reason="TOML needs Python 3.11")
SETTINGS = {"env": "Hopper-v4", "total_steps": 1e6, "lr": 1e-4, "overlap": True, "wandb": False, "threads": 1}
SETTINGS |= {"policy_hid_list": [32, 32], "env_kwargs": {"frame_skip": 2}, "eval_every": None}


@pytest.fixture
def written(tmp_path):
    """written(settings): the path of a JSON file with them."""

    def write(settings, name="settings.json"):
        (tmp_path / name).write_text(settings if isinstance(settings, str) else json.dumps(settings))
        return str(tmp_path / name)

    return write


def refused(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as ended:
        parse([*arguments])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.count("\n") == 1 and err.startswith("train.py: ")
    return err.removeprefix("train.py: ")


def test_settings_come_from_a_file_and_options_win(written):
    path = written(SETTINGS)
    plain = ["Hopper-v4", "--total_steps", "1e6", "--lr", "1e-4", "--overlap", "--threads", "1"]
    plain += ["--policy_hid_list", "32,32", "--env_kwargs", '{"frame_skip": 2}']
    assert parse(["--config", path]) == parse(plain)
    assert parse(["--config", path, "--lr", "1e-3", "-n", "5"]) == replace(parse(plain), lr=1e-3, num_episodes=5)
    assert parse(["Walker2d-v4", "--config", path]).env == "Walker2d-v4"


def test_options_replace_what_cannot_stand_beside_them(written):
    segments = written({"env": "Hopper-v4", "batch_steps": 4000, "num_envs": 10, "minibatch_rows": 64, "name": "a"})
    config = parse(["--config", segments, "-b", "4", "--minibatches", "2", "--run_dir", "x"])
    assert (config.batch_steps, config.batch_size, config.minibatches, config.name) == (None, 4, 2, None)
    episodes = written({"env": "Hopper-v4", "batch_size": 7})
    assert parse(["--config", episodes]).batch_steps is None
    assert parse(["--config", episodes, "--batch_steps", "100"]).batch_steps == 100


@TOML
def test_toml(written):
    text = 'env = "Hopper-v4"\ntotal_steps = 1e6\npolicy_hid_list = [32, 32]\noverlap = true\n'
    text += "[env_kwargs]\nframe_skip = 2\n"
    given = {name: SETTINGS[name] for name in ("env", "total_steps", "policy_hid_list", "overlap", "env_kwargs")}
    assert parse(["--config", written(text, "a.toml")]) == parse(["--config", written(given)])


@pytest.mark.parametrize("how", [[], ["-b", "5"], ["--algo", "trpo"], ["--algo", "ppo-kl"], ["--eval_every", "100"]])
def test_a_runs_own_settings_give_the_same_run(written, how):
    first = parse(["Hopper-v4", "--seed", "3", "--name", "one", "--nprocs", "2", *how]).effective
    path = written(first | {"run_dir": "runs/x", "versions": {"numpy": "2"}, "commands": ["python train.py"]})
    again = parse(["--config", path]).effective
    assert again | {"name": "one", "run_dir": None} == first | {"run_dir": None}
    assert (
        parse(["--config", path, "--seed", "4", "--algo", "vpg"]).algo == "vpg"
    )  # what has no effect then is left out


def test_what_is_wrong_is_one_line(written, capsys, tmp_path):
    for settings, line in {
        '{"env": "Hopper-v4", "learning_rate": 0.1}': "--learning_rate=0.1; did you mean --lr?",
        '{"env": "Hopper-v4", "overlapp": false}': "--overlapp=False; did you mean --overlap?",
        '{"env": "Hopper-v4", "nix": null}': "unrecognized arguments: --nix=None",
        '{"env": "Hopper-v4", "lr": "high"}': "argument --lr: invalid float value: 'high'",
        '{"env": "Hopper-v4", "algo": "sarsa"}': "argument --algo: invalid choice: 'sarsa'",
        "[1]": "it is not an object of settings by name",
        "{": "is neither TOML (as FILE.toml) nor JSON: ",
        '{"env": "Hopper-v4", "clip": 0.1, "algo": "trpo"}': "--clip has no effect with --algo trpo",
        '{"lr": 0.1}': "give either an environment",
        '{"env": "Hopper-v4", "seeds": "0-4"}': "give --seeds on the command line",
    }.items():
        path = written(settings)
        err = refused(capsys, "--config", path)
        assert line in err and (path in err or "effect" in err or "either" in err), err
    assert "No such file" in refused(capsys, "--config", str(tmp_path / "nix.json"))
    assert "--config cannot change on --resume" in refused(capsys, "--resume", "x", "--config", written(SETTINGS))


def test_what_the_command_line_says_counts_in_full(written, monkeypatch):
    monkeypatch.setattr(mpi_util, "usable_cores", lambda: 7)
    command = {"env_command": "mpiexec -n 2 python -m mpi_util.serve mine:make"}
    config = parse(["Hopper-v4", "--config", written(command), "--trust"])
    assert (config.env, config.env_command) == ("Hopper-v4", None)
    config = parse(["--env_command", command["env_command"], "--log_dir", "logs", "--config", written(SETTINGS)])
    assert (config.env, config.log_dir) == ("mine:make", "logs")  # where the command's output goes
    files = {"cores": written({"env": "m:f", "nprocs": "auto"}, "a.json"), "four": written({"env": "m:f", "nprocs": 4})}
    for file, more, n in [
        ("cores", "", 7), ("cores", "--nprocs 2", 2), ("cores", "--ranks_per_env 3", 6), ("four", "", 4),
        ("four", "--nprocs auto", 7), ("four", "--nprocs=auto --hosts h1:3,h2:2", 5), ("cores", "--nprocs auto", 7),
    ]:  # fmt: skip
        assert parse([*more.split(), "--config", files[file], "--trust"]).nprocs == n, (file, more)


def test_auto_is_no_more_processes_than_have_work(monkeypatch):
    monkeypatch.setattr(mpi_util, "usable_cores", lambda: 64)
    for more, n in {"": 20, "--overlap": 21, "--ranks_per_env 2": 40, "-b 20": 64, "--hosts h1:16,h2:16": 20}.items():
        env = "m:f" if "ranks" in more else "Hopper-v4"
        assert parse([env, "--nprocs", "auto", *more.split()]).nprocs == n, more


def test_a_resumed_run_keeps_its_teams_whole(written, tmp_path, monkeypatch):
    monkeypatch.setattr(mpi_util, "usable_cores", lambda: 7)
    Path(written(parse(["m:f", "--ranks_per_env", "3", "--nprocs", "3"]).effective)).rename(tmp_path / "config.json")
    assert parse(["--resume", str(tmp_path), "--nprocs", "auto", "--trust"]).nprocs == 6


def test_a_preset_in_a_file_gives_way_to_the_file(written):
    config = parse(["--config", written({"env": "ALE/Pong-v5", "preset": "atari", "epochs": 3}), "--lr", "1"])
    assert (config.batch_steps, config.epochs, config.vf_epochs, config.lr) == (1024, 3, 4, 1.0)


def test_modules_that_a_file_names_need_trust(written, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    theirs = {"env": "tests.envs:Walk-v0"}
    path = written(theirs)
    assert "would import 'tests.envs'" in refused(capsys, "--config", path)
    assert parse(["--config", path, "--trust"]).env == theirs["env"]
    assert parse([theirs["env"], "--config", path]).env == theirs["env"]  # she has said it herself
    assert "'nix'" in refused(capsys, "--config", written({"env": "Hopper-v4", "hook": "nix:f"}))
    sign(tmp_path, Config(env=theirs["env"]))  # as a run of hers does in its folder
    assert parse(["--config", written(theirs)]).env == theirs["env"]
