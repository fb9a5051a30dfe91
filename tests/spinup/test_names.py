"""The names of Spinning Up's tools: that they are there, with these arguments, and work."""

import importlib
import importlib.util
import inspect
import json
import re
import sys

import numpy as np
import pytest
from conftest import ROOT, run

import mpi_util
from mpi_util.errors import UsageError
from mpi_util_spinup.logx import EpochLogger, Logger

PPO = """env_fn actor_critic ac_kwargs seed=0 steps_per_epoch=4000 epochs=50 gamma=0.99 clip_ratio=0.2 pi_lr=0.0003
vf_lr=0.001 train_pi_iters=80 train_v_iters=80 lam=0.97 max_ep_len=1000 target_kl=0.01 logger_kwargs save_freq=10"""
VPG = """env_fn actor_critic ac_kwargs seed=0 steps_per_epoch=4000 epochs=50 gamma=0.99 pi_lr=0.0003 vf_lr=0.001
train_v_iters=80 lam=0.97 max_ep_len=1000 logger_kwargs save_freq=10"""
TRPO = """env_fn actor_critic ac_kwargs seed=0 steps_per_epoch=4000 epochs=50 gamma=0.99 delta=0.01 vf_lr=0.001
train_v_iters=80 damping_coeff=0.1 cg_iters=10 backtrack_iters=10 backtrack_coeff=0.8 lam=0.97 max_ep_len=1000
logger_kwargs save_freq=10 algo=trpo"""

# module -> name -> its arguments in their order, with the defaults that programs may rely on; None: it is no function
NAMES = {
    "mpi_tools": {
        "mpi_fork": "n bind_to_core=False", "msg": "m", "proc_id": "", "num_procs": "",
        "broadcast": "x root=0", "mpi_sum": "x", "mpi_avg": "x", "mpi_statistics_scalar": "x with_min_and_max=False",
        "mpi_moments": "x axis=0 comm=None keepdims=False",
    },
    "mpi_pytorch": {"setup_pytorch_for_mpi": "", "mpi_avg_grads": "module", "sync_params": "module"},
    "mpi_tf": {
        "flat_concat": "xs", "assign_params_from_flat": "x params", "sync_params": "params", "sync_all_params": "",
    },
    "logx": {
        "colorize": "string color bold=False highlight=False", "restore_tf_graph": "sess fpath", "color2num": None,
        "Logger": "output_dir=None output_fname=progress.txt exp_name=None", "EpochLogger": None,
    },
    "run_utils": {
        "setup_logger_kwargs": "exp_name seed=None data_dir=None datestamp=False",
        "call_experiment": "exp_name thunk seed=0 num_cpu=1 data_dir=None datestamp=False",
        "ExperimentGrid": "name", "all_bools": "vals", "valid_str": "v", "DEFAULT_DATA_DIR": None,
    },
    "serialization_utils": {"convert_json": "obj", "is_json_serializable": "v"},
    "plot": {
        "make_plots": "all_logdirs legend=None xaxis=None values=None count=False font_scale=1.5 smooth=1 select=None "
        "exclude=None estimator=mean",
        "get_datasets": "logdir condition=None", "main": None,
    },
    "play_policy": {
        "load_policy_and_env": "fpath itr=last deterministic=False",
        "run_policy": "env get_action max_ep_len=None num_episodes=100 render=True",
    },
    "run": {"main": None},
    "": {
        "ppo": PPO, "vpg": VPG, "trpo": TRPO,
        "MLPActorCritic": "observation_space action_space hidden_sizes activation",
        "PPOBuffer": "obs_dim act_dim size gamma=0.99 lam=0.95",
        "VPGBuffer": "obs_dim act_dim size gamma=0.99 lam=0.95",
    },
}  # fmt: skip
METHODS = {
    Logger: "log log_tabular dump_tabular save_config save_state setup_pytorch_saver setup_tf_saver "
    "first_row log_headers log_current_row output_file pytorch_saver_elements",
    EpochLogger: "store log_tabular dump_tabular get_stats",
}


@pytest.mark.parametrize("module", NAMES)
def test_the_names_are_there_with_their_arguments(module):
    found = importlib.import_module(module if module == "mpi_util" else f"mpi_util_spinup.{module}".rstrip("."))
    for name, expected in NAMES[module].items():
        thing = getattr(found, name)
        if not expected:
            continue
        known = inspect.signature(thing).parameters
        for word in expected.split():
            argument, _, default = word.partition("=")
            assert argument in known or any(p.kind is p.VAR_POSITIONAL for p in known.values()), (name, argument)
            assert not default or str(known[argument].default) == default, (name, argument)


@pytest.mark.tensorflow
def test_names_that_load_tensorflow():
    """In a process of its own: what has asked for them once has them."""
    program = (
        "import sys, mpi_util, mpi_util_spinup.mpi_tf; print('tf_config' in mpi_util.__all__); import tensorflow\n"
    )
    program += "del sys.modules['mpi_util']\nfrom mpi_util import *\nfrom mpi_util_spinup.mpi_tf import *\n"
    program += "print(MpiAdamOptimizer.__name__, tf_config)"
    done = run([sys.executable, "-c", program], 60)
    assert done.out.startswith("False\nMpiAdamOptimizer ") and "gpu_options" in done.out, done.err


@pytest.mark.parametrize("kind", METHODS)
def test_the_methods_are_there(kind):
    logger = kind()
    assert not [name for name in METHODS[kind].split() if not hasattr(logger, name)]


def test_a_line_of_dashes_has_the_time_of_the_whole_loop(capsys):
    mpi_util.timeit("-----")
    parts = [mpi_util.timeit("a"), mpi_util.timeit("b")]
    assert mpi_util.timeit("-----") >= sum(parts) > 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["-----", "a", "b", "-----"]


def test_the_current_row_can_be_read_before_it_is_written(tmp_path):
    logger = EpochLogger(tmp_path)
    logger.store(EpRet=[1.0, 3.0])
    logger.log_tabular("EpRet", with_min_and_max=True)
    logger.log_tabular("Epoch", 0)
    assert logger.log_current_row == {"AverageEpRet": 2, "StdEpRet": 1, "MaxEpRet": 3, "MinEpRet": 1, "Epoch": 0}
    logger.dump_tabular()
    assert logger.log_current_row == {} and logger.output_file.name == str(tmp_path / "progress.txt")
    assert (tmp_path / "progress.txt").read_text().splitlines()[1].split("\t") == ["2.0", "1.0", "3.0", "1.0", "0"]


@pytest.mark.parametrize("algorithm", ["ppo", "vpg"])
def test_the_table_is_spinning_ups(tmp_path, algorithm):
    """Its columns are those of the programs there; KL and the changes are of the last loss that was calculated."""
    import gymnasium

    import mpi_util_spinup as spinup

    how = {"seed": 7, "steps_per_epoch": 60, "epochs": 2, "train_v_iters": 1, "logger_kwargs": {"output_dir": tmp_path}}
    how |= {"train_pi_iters": 1} if algorithm == "ppo" else {}
    getattr(spinup, algorithm)(lambda: gymnasium.make("Pendulum-v1"), **how)
    header, *rows = [line.split("\t") for line in (tmp_path / "progress.txt").read_text().splitlines()]
    names = "Epoch AverageEpRet StdEpRet MaxEpRet MinEpRet EpLen AverageVVals StdVVals MaxVVals MinVVals"
    names += " TotalEnvInteracts LossPi LossV DeltaLossPi DeltaLossV Entropy KL"
    assert header == [*names.split(), *["ClipFrac", "StopIter"] * (algorithm == "ppo"), "Time"]
    row = dict(zip(header, map(float, rows[0])))
    assert row["DeltaLossPi"] == row["DeltaLossV"] == 0 and abs(row["KL"]) < 1e-6
    assert abs(row["Entropy"] - (0.5 + 0.5 * np.log(2 * np.pi) - 0.5)) < 1e-6  # of one part of an action


@pytest.mark.slow
def test_rank_0_alone_may_read_the_current_row(run_ranks):
    run_ranks("spinup_row.py", 3)


# ---- the command line


def command(*arguments, status=0, cwd):
    done = run([sys.executable, "-m", *arguments], 120, {"PYTHONPATH": str(ROOT)}, cwd=cwd)
    assert done.status == status, done.out + done.err
    return done


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "trpo"])
def test_an_algorithm_runs_from_the_command_line(tmp_path, algorithm):
    grid = algorithm == "ppo"
    options = ["--env", "CartPole-v1", "--cpu", 2, "--epochs", 2, "--steps_per_epoch", 301, "--exp_name", "cart"]
    options += ["--hid", "[32]", "--gamma[g]", 0.9] + [0.99] * grid
    command("mpi_util_spinup.run", algorithm, *options, cwd=tmp_path)
    names = ["cart_g0-9", "cart_g0-99"] if grid else ["cart"]  # a value that does not vary is not in the name
    folders = [tmp_path / "data" / name / f"{name}_s0" for name in names]
    for folder in folders:
        header, *rows = (line.split("\t") for line in (folder / "progress.txt").read_text().splitlines())
        assert len(rows) == 2 and {"AverageEpRet", "LossPi", "DeltaLossV", "KL", "TotalEnvInteracts"} <= set(header)
        assert all(np.isfinite(float(cell)) for row in rows for cell in row)
    if grid:
        command(
            "mpi_util_spinup.run", "plot", "data/cart_g0-9", "--out", "c.png", "-y", "Performance", "KL", cwd=tmp_path
        )
        assert (tmp_path / "c.png").exists()
    play = ["mpi_util_spinup.play_policy", folders[0], "-n", 3]
    assert "which can run any code" in command(*play, status=2, cwd=tmp_path).err
    played = command(*play, "--trust", cwd=tmp_path).out
    assert played.count("Episode ") == 3 and "AverageEpRet" in played and "no display here" in played


@pytest.mark.slow
def test_the_command_lines_own_names(tmp_path):
    short = ["--env", "CartPole-v1", "--cpu", "auto", "--epochs", 1, "--steps_per_epoch", 40, "--train_v_iters", 1]
    command(
        "mpi_util_spinup.run", "vpg_pytorch", *short, "--dt", "--act", "torch.nn.ReLU", "--data_dir", "d", cwd=tmp_path
    )
    (table,) = tmp_path.rglob("progress.txt")
    day, second = r"\d{4}-\d\d-\d\d", r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d"
    name = "cmd_vpg_pytorch"
    assert re.fullmatch(f"d/{day}_{name}/{second}-{name}_s0", str(table.parent.relative_to(tmp_path)))
    assert "'ReLU'" in repr(json.loads((table.parent / "config.json").read_text())["ac_kwargs"])
    assert "clip_ratio" in command("mpi_util_spinup.run", "ppo", "--help", cwd=tmp_path).out


def test_a_policy_is_played_in_an_environment_of_ones_own(tmp_path, capsys):
    """As Spinning Up's page on saved runs does where the environment could not be pickled."""
    import gymnasium

    from mpi_util_spinup import MLPActorCritic
    from mpi_util_spinup.play_policy import load_policy_and_env, run_policy

    env, logger = gymnasium.make("CartPole-v1"), Logger(tmp_path / "run")
    logger.setup_pytorch_saver(MLPActorCritic(env.observation_space, env.action_space))
    logger.save_state({"env": lambda: 0})
    none, act = load_policy_and_env(tmp_path / "run", trust=True)
    assert none is None
    with pytest.raises(UsageError, match="the environment was not saved"):
        run_policy(none, act)
    run_policy(env, act, 0, 2, render=False)
    out = capsys.readouterr().out
    assert out.count("\nEpisode ") == 2 and "StdEpRet" in out
    run_policy(env, act, 0, 1, render=False)
    assert "Std" not in capsys.readouterr().out  # of one episode
    logger.setup_pytorch_saver(MLPActorCritic(env.observation_space, env.action_space, (8,)))
    logger.save_state({"env": env}, 10)
    found, act = load_policy_and_env(str(tmp_path / "run"), trust=True)  # the highest iteration, as there
    assert found.spec.id == "CartPole-v1" and act(np.zeros(4)).shape == ()


def test_bad_command_lines_get_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "pyt_save").mkdir()
    (tmp_path / "pyt_save" / "model3.pt").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    for (module, *arguments), problem in {
        ("run", "sac", "--env", "x"): "'sac' is none of: ppo, vpg, trpo, plot, test_policy",
        ("run", "ppo"): "give an environment",
        ("run", "ppo", "--env", "CartPole-v1", "--nix", "1"): "ppo has no argument nix; it has: ac_kwargs",
        ("run", "ppo", "x"): "'x' is no option",
        ("run", "ppo", "--env", "CartPole-v1", "--cpu", "1", "2"): "--num_cpu takes one value",
        ("run", "ppo", "--env", "CartPole-v1", "--data_dir"): "--data_dir takes one value",
        ("run", "ppo", "--env", "CartPole-v1", "--dt", "no"): "--datestamp takes one value",
        ("run", "ppo", "--env", "CartPole-v1", "--logger_kwargs", "x"): "ppo has no argument logger_kwargs",
        ("play_policy", ".", "--trust"): "cannot load pyt_save/model3.pt: EOFError: ",
        ("run", "ppo", "--env", "CartPol-v1"): "--env CartPol-v1: Environment `CartPol` doesn't exist",
        ("play_policy", "."): "pyt_save/model3.pt is a pickle, which can run any code",
        ("play_policy", ".", "-i", "5"): "has neither tf1_save5 nor pyt_save/model5.pt",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            sys.exit(importlib.import_module(f"mpi_util_spinup.{module}").main(arguments))
        err = capsys.readouterr().err
        assert problem in err and err.count("\n") == 1, err
    monkeypatch.setitem(sys.modules, "torch", None)
    assert importlib.import_module("mpi_util_spinup.run").main(["ppo", "--env", "CartPole-v1"]) == 2
    assert "needs PyTorch, which is not installed: pip install torch\n" in capsys.readouterr().err


def test_words_of_the_command_line_are_values_or_stay_words():
    from mpi_util_spinup.run import _parsed, value

    words = ["1e-3", "[32,32]", "{[]:1}", "torch.nn.relu"]
    assert [value(word) for word in words] == [1e-3, [32, 32], "{[]:1}", "torch.nn.relu"]
    names = {"exp_name": ["2024_01_05"], "data_dir": ["1e3"]}  # as they were written
    assert _parsed(["--exp_name", "2024_01_05", "--data_dir=1e3"])[0] == names


def test_a_buffer_must_be_full():
    from mpi_util_spinup import PPOBuffer

    buffer = PPOBuffer((3,), (), 2, 0.5, 1.0)
    buffer.store(np.ones(3), 1, 1.0, 0.5, -0.1)
    with pytest.raises(UsageError, match="1 of 2 steps"):
        buffer.get()
    buffer.store(np.ones(3), 0, 2.0, 1.0, -0.2)
    buffer.finish_path(4.0)
    data = buffer.get()
    assert data["ret"].tolist() == [1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4] and abs(float(data["adv"].mean())) < 1e-6


@pytest.mark.slow
def test_ppo_learns_cartpole(tmp_path):
    done = command(
        "mpi_util_spinup.run", "ppo", "--env", "CartPole-v1", "--epochs", 12, "--steps_per_epoch", 2000,
        "--pi_lr", 3e-3, "--cpu", 2, "--exp_name", "learns", cwd=tmp_path,
    )  # fmt: skip
    header, *rows = (line.split("\t") for line in next(tmp_path.rglob("progress.txt")).read_text().splitlines())
    assert float(rows[-1][header.index("AverageEpRet")]) > 120, done.out
    assert json.loads(next(tmp_path.rglob("config.json")).read_text())["env_fn"] == "CartPole-v1"
