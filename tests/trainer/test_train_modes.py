"""train.py's algorithms, frameworks and ways to share the work: the same bits, and one result whichever is taken."""

import itertools
import json
import os
from importlib.util import find_spec

import numpy as np
import pytest
from conftest import ROOT
from training import rows, train

from policies.actor import Spec
from trainer.command_line import parse
from trainer.config import Config
from trainer.environment import make_env
from trainer.record import Record
from trainer.run_folder import CHECKPOINT, RunFolder, checkpoints, load

HOPPER = Spec(11, 3, False, (64, 64), (64, 64))
SHORT = ["Hopper-v4", "--total_steps", 800, "--batch_steps", 400, "--num_envs", 8]
EPISODES = ["Hopper-v4", "-n", 12, "-b", 6]
BATCH = ["--vf_epochs", 2, "--epochs", 3]
OF_GAMMA = {"never": [], "given": ["--gamma", 0.99]}
TF_OFF = "raise ModuleNotFoundError(\"No module named 'tensorflow'\", name='tensorflow')"


def brief(algo):
    """BATCH, as far as the algorithm has it."""
    return [*(BATCH[:2] if algo == "trpo" else BATCH), "--algo", algo]


def run(folder, *arguments, **more):
    """Weights and progress of a run."""
    train(*arguments, "--run_dir", folder, **more)
    return (folder / "policy.safetensors").read_bytes(), rows(folder)


@pytest.mark.slow_unless(algo="trpo")
@pytest.mark.parametrize("algo", ["ppo-kl", "vpg", "trpo"])
def test_each_algorithm_gives_the_same_bits_at_any_size(tmp_path, algo):
    made = [run(tmp_path / str(n), *EPISODES, "--algo", algo, "--nprocs", n) for n in (1, 3)]
    assert made[0] == made[1] and len(made[0][1]) == 2


@pytest.mark.slow
def test_overlap_gives_the_same_bits_at_any_size(tmp_path):
    way = ["--overlap", "--eval_every", 300, "--eval_episodes", 2]
    for name, work in (("episodes", [*EPISODES[:2], 18, *EPISODES[3:]]), ("segments", SHORT)):
        made = [run(tmp_path / f"{name}{n}", *work, *way, "--nprocs", n) for n in (1, 4 if name == "episodes" else 2)]
        assert made[0] == made[1]
        assert [int(row["Iteration"]) for row in made[0][1]] == [1, 2, 3][: len(made[0][1])]


@pytest.mark.slow
def test_overlap_collects_with_the_weights_before_the_update(tmp_path):
    ways = {"lock-step": [], "overlap": ["--overlap"], "frozen": ["--overlap", "--lr", 1e-30]}
    made = {name: run(tmp_path / name, *EPISODES[:2], 18, *EPISODES[3:], *way)[1] for name, way in ways.items()}
    lock_step, overlap, frozen = ([row["AverageEpRet"] for row in each] for each in made.values())
    assert overlap[:2] == frozen[:2] and overlap[2] != frozen[2]
    assert lock_step[0] == frozen[0] and lock_step[1] != frozen[1]


@pytest.mark.tensorflow
def test_tensorflow_gives_the_same_bits_at_any_size(tmp_path):
    made = [run(tmp_path / str(n), *SHORT, *brief("trpo"), "--framework", "tf", "--nprocs", n) for n in (1, 3)]
    assert made[0] == made[1] and len(made[0][1]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("algo, mpi", [("ppo", "mpich"), ("trpo", "openmpi")], indirect=["mpi"])
def test_both_ways_to_share_the_work_agree(tmp_path, mpi, algo):
    run(tmp_path / "gather", *EPISODES, *brief(algo), "--nprocs", 1)
    made = [
        run(tmp_path / name, *EPISODES, *brief(algo), "--nprocs", 3, "--parallel", "average", mpi=mpi)
        for name in ("average", "again")
    ]
    assert made[0] == made[1]  # the same bits for the same number of processes
    expected, averaged = (load(tmp_path / name / "policy.safetensors")[0] for name in ("gather", "average"))
    for name, array in expected.items():
        scale = np.abs(array).max() + 1e-3
        assert np.allclose(array, averaged[name], rtol=1e-3, atol=2e-3 * scale), name
    first = [float(rows(tmp_path / name)[0]["AverageEpRet"]) for name in ("gather", "average")]
    assert first[0] == pytest.approx(first[1], rel=1e-9)


@pytest.mark.slow
def test_one_full_batch_step_is_the_same_in_both(tmp_path):
    once = ["Hopper-v4", "-n", 6, "-b", 6, "--algo", "vpg", "--epochs", 1, "--vf_epochs", 1, "--minibatches", 1]
    run(tmp_path / "gather", *once, "--nprocs", 2)
    run(tmp_path / "average", *once, "--nprocs", 4, "--parallel", "average")
    expected, averaged = (load(tmp_path / name / "policy.safetensors")[0] for name in ("gather", "average"))
    assert all(np.allclose(expected[name], averaged[name], rtol=1e-4, atol=1e-6) for name in expected)


@pytest.mark.tensorflow
def test_tensorflow_averages_too(tmp_path):
    way = [*SHORT, *BATCH, "--framework", "tf"]
    run(tmp_path / "gather", *way)
    run(tmp_path / "average", *way, "--nprocs", 2, "--parallel", "average")
    expected, averaged = (load(tmp_path / name / "policy.safetensors")[0] for name in ("gather", "average"))
    assert all(np.allclose(expected[name], averaged[name], rtol=1e-3, atol=2e-3) for name in expected)


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_run_goes_on_with_the_other_framework(tmp_path):
    run(tmp_path / "whole", *EPISODES, *BATCH)
    run(tmp_path / "parts", *EPISODES[:2], 6, *EPISODES[3:], *BATCH)
    train("--resume", tmp_path / "parts", "-n", 12, "--framework", "tf")
    whole, parts = (load(tmp_path / name / "policy.safetensors")[0] for name in ("whole", "parts"))
    assert all(np.allclose(whole[name], parts[name], rtol=1e-3, atol=2e-3) for name in whole)
    assert len(rows(tmp_path / "parts")) == 2


@pytest.mark.slow
def test_an_averaging_run_is_resumed_to_the_same_bits(tmp_path):
    way = [*BATCH, "--algo", "ppo-kl", "--nprocs", 3, "--parallel", "average"]
    whole = run(tmp_path / "whole", *EPISODES, *way)
    run(tmp_path / "parts", *EPISODES[:2], 6, *EPISODES[3:], *way)
    train("--resume", tmp_path / "parts", "-n", 12, "--nprocs", 3)
    assert (tmp_path / "parts" / "policy.safetensors").read_bytes() == whole[0]


@pytest.mark.slow
def test_evaluation_changes_nothing_at_any_size(tmp_path):
    trial = ["--eval_every", 300, "--eval_episodes", 5]
    plain = run(tmp_path / "plain", *SHORT)
    made = [run(tmp_path / str(n), *SHORT, *trial, "--nprocs", n) for n in (1, 3)]
    assert made[0] == made[1] and made[0][0] == plain[0]
    best = max(float(row["AverageTestEpRet"]) for row in made[0][1])
    assert load(tmp_path / "3" / "best.safetensors")[1]["test_ret"] == best


@pytest.mark.slow
def test_a_wide_policy_gives_the_same_bits_at_any_size(tmp_path):
    """10, 5 or 4 and 3 of them on a rank: more or fewer rows than a product has."""
    wide = [
        "Hopper-v4",
        "--batch_steps",
        300,
        "--num_envs",
        10,
        "--policy_hid_list",
        "1100,1000",
        *BATCH[:2],
        "--epochs",
        1,
    ]
    wide += ["--eval_every", 300, "--eval_episodes", 2, "--lr_schedule", "constant"]
    made = [
        run(tmp_path / str(n), *wide, "--total_steps", 900, "--nprocs", n, "--save_every", seconds)
        for n, seconds in ((1, 0), (2, 99))  # after a checkpoint rank 0 must act with one thread too
    ]
    run(tmp_path / "parts", *wide, "--total_steps", 300, "--nprocs", 2)
    train("--resume", tmp_path / "parts", "--total_steps", 900, "--nprocs", 3)
    made.append(((tmp_path / "parts" / "policy.safetensors").read_bytes(), rows(tmp_path / "parts")))
    assert made[0] == made[1] == made[2] and len(made[0][1]) == 3


@pytest.mark.slow
def test_returns_can_scale_the_rewards(tmp_path):
    made = [run(tmp_path / str(n), *SHORT, "--rew_scale", "returns", "--nprocs", n) for n in (1, 3)]
    assert made[0] == made[1] != run(tmp_path / "gamma", *SHORT, "--rew_scale", "gamma")


@pytest.mark.slow
def test_deviations_fall_as_far_as_asked_at_any_size(tmp_path):
    """A run that is resumed with a later end has those of a run with that end: it would hardly learn with less."""
    free, fast = (["--seed", 1, "--std_fall", x, "--log_std", 0, "--lr", 3e-3] for x in (0, 0.01))
    made = [run(tmp_path / str(n), *SHORT, *fast, "--nprocs", n) for n in (1, 3)]
    assert made[0] == made[1] != run(tmp_path / "free", *SHORT, *free)
    log_std, others = (load(tmp_path / x / "policy.safetensors")[0]["policy/log_std"] for x in ("1", "free"))
    assert others.min() < -0.01 and log_std.min() == pytest.approx(-0.005, abs=1e-6)
    train(*SHORT, "--batch_steps", 80, "--lr", 1e-9, "--log_std", 0, "--run_dir", tmp_path / "still")
    for more, fall in ((("--total_steps", 800), 0.5), (("--total_steps", 80_000, "-n", 60), 0.01)):
        train("--resume", tmp_path / "still", *more)
        log_std = load(tmp_path / "still" / "policy.safetensors")[0]["policy/log_std"]
        np.testing.assert_allclose(log_std, -3.5 * fall, atol=1e-2 * (fall < 0.1) + 1e-6)
    train("CartPole-v1", "--total_steps", 400, "--batch_steps", 400, "--run_dir", tmp_path / "discrete")


IDLE = {"rollout": 2.0, "gather": 0.5, "update": 3.0, "bcast": 0.1, "record": 0.5}


def test_the_idle_share_counts_what_others_collect_meanwhile(tmp_path):
    record = Record(parse(["Hopper-v4", "--nprocs", "2", "--run_dir", str(tmp_path)]), HOPPER, {})
    assert record.times(100, IDLE, busy_s=5.1)["IdleShare"] == pytest.approx(1 - 5.1 / 6)  # of 2 ranks, 3 s each
    assert record.times(100, IDLE, busy_s=6.1)["IdleShare"] == 0.0
    assert record.times(100, IDLE | {"beside": 1.0}, busy_s=5.1)["IdleShare"] == pytest.approx(1 - 6.1 / 8)
    assert record.times(100, IDLE, busy_s=5.1)["StepsPerSecond"] == pytest.approx(100 / 5.6, rel=1e-2)


@pytest.mark.slow
def test_with_overlap_each_row_has_the_time_that_its_batch_took(tmp_path):
    run(tmp_path / "run", *SHORT, "--overlap", "--nprocs", 2)
    train("--resume", tmp_path / "run", "--total_steps", 1600)
    lines = [line.split("\t") for line in (tmp_path / "run" / "progress.txt").read_text().splitlines()]
    times = [dict(zip(lines[0], map(float, line))) for line in lines[1:]]
    assert len(times) > 2 and all(row["RolloutS"] + row["GatherS"] > 0 for row in times)  # the last one's, too
    for row in times:
        spent = sum(row[name] for name in ("RolloutS", "GatherS", "UpdateS", "BcastS"))
        assert row["StepsPerSecond"] == pytest.approx(400 / spent, rel=0.01)


@pytest.mark.slow
def test_with_overlap_a_row_counts_the_episodes_that_it_shows(tmp_path):
    run(tmp_path / "run", "Pendulum-v1", "--total_steps", 1500, "--batch_steps", 150, "--num_envs", 1, "--overlap")
    lines = [line.split("\t") for line in (tmp_path / "run" / "progress.txt").read_text().splitlines()]
    found = [dict(zip(lines[0], map(float, line))) for line in lines[1:]]
    assert found[-1]["Episodes"] == 7  # of 200 steps each
    for before, row in itertools.pairwise(found):
        assert (row["Episodes"] > before["Episodes"]) == (not np.isnan(row["AverageEpRet"])), row


def test_episodes_of_one_length_do_not_all_begin_at_once(tmp_path):
    way = ["Pendulum-v1", "--batch_steps", 80, "--num_envs", 4, "--lr_schedule", "constant", "--std_fall", 0]
    whole, folder = run(tmp_path / "whole", *way, "--total_steps", 1600), tmp_path / "parts"
    run(folder, *way, "--total_steps", 240, "--nprocs", 3)  # 60 steps of each: the first one's episode was cut at 50
    train("--resume", folder, "--total_steps", 1600)
    assert ((folder / "policy.safetensors").read_bytes(), rows(folder)) == whole
    ends = [200, 250, 300, 350, 400]  # of episodes of 200 steps; those that are cut are not shown
    assert [int(row["Episodes"]) for row in whole[1]] == [sum(end <= 20 * i for end in ends) for i in range(1, 21)]
    assert {row["EpLen"] for row in whole[1]} == {"nan", "200.0"}


def test_gamma_is_higher_from_the_second_iteration_on_until_an_episode_is_short(tmp_path):
    way = ["--batch_steps", 80, "--num_envs", 4, "--lr_schedule", "constant", "--std_fall", 0, "--total_steps"]
    long = ["HalfCheetah-v4", "--batch_steps", 1200, "--num_envs", 1, "--total_steps", 2400]
    never, given = (run(tmp_path / name, *long, *more)[1] for name, more in OF_GAMMA.items())
    assert [mine["LossV"] == other["LossV"] for mine, other in zip(never, given)] == [True, False]
    assert never[0]["EpLen"] == "1000.0"
    whole, folder = run(tmp_path / "whole", "CartPole-v1", *way, 320), tmp_path / "parts"
    run(folder, "CartPole-v1", *way, 80, "--nprocs", 3)
    train("--resume", folder, "--total_steps", 320)
    assert ((folder / "policy.safetensors").read_bytes(), rows(folder)) == whole
    assert whole == run(tmp_path / "near", "CartPole-v1", *way, 320, "--gamma", 0.99)  # whose first episodes are short
    assert [{row["Gamma"] for row in each} for each in (never, whole[1])] == [{"0.997"}, {"0.99"}]
    run(tmp_path / "scaled", "--config", folder / "config.json", "--rew_scale", "gamma")
    assert load(tmp_path / "scaled" / CHECKPOINT)[0]["rew_scale"] == 1.0 - 0.99


def test_errors_of_the_values_alone_change_no_policy(tmp_path):
    """Where no episode ends, advantages hold nothing else, and their deviation would still be scaled to 1."""
    way = ["tests.envs:Same-v0", "--batch_steps", 200, "--num_envs", 4, "--lr_schedule", "constant", "--std_fall", 0]
    way += ["--gamma", 0.9, "--total_steps"]
    whole = run(tmp_path / "whole", *way, 7200)
    learned = whole[1][19:]  # by then the values are learned
    for before, row in itertools.pairwise(learned):
        still = row["Episodes"] == before["Episodes"]
        assert (row["StopIter"], row["KL"] == "0.0") == ("0.0" if still else "10.0", still), row
    assert sum(float(row["ExplainedVar"]) < -1.0 for row in whole[1][:15] if row["StopIter"] == "10.0") == 2
    run(folder := tmp_path / "parts", *way, 6800, "--nprocs", 3)  # the next two iterations are such
    train("--resume", folder, "--total_steps", 7200)
    assert ((folder / "policy.safetensors").read_bytes(), rows(folder)) == whole
    average = run(tmp_path / "average", *way, 7200, "--parallel", "average", "--nprocs", 2)
    assert [row["StopIter"] for row in average[1][-2:]] == ["0.0", "0.0"]
    entropy = run(tmp_path / "entropy", *way, 7200, "--ent_coef", 0.01)
    assert {row["StopIter"] for row in entropy[1]} == {"10.0"}


@pytest.mark.slow
def test_a_run_of_an_older_version_continues(tmp_path):
    way = ["--overlap", "--eval_every", 400, "--eval_async", "--gamma", 0.99, "--save_every", 0, "--keep", 9]
    whole, folder = run(tmp_path / "run", *SHORT[:2], 1600, *SHORT[3:], *way), tmp_path / "run"
    for path in checkpoints(folder):
        arrays, notes = load(path)
        path.unlink()
        if "ready/obs" in arrays:
            found = arrays, notes
    older = {name: array for name, array in found[0].items() if "gamma" not in name and name != "adv_std"}
    RunFolder(folder, new=True).save(CHECKPOINT, older, found[1])
    train("--resume", folder)
    assert (folder / "policy.safetensors").read_bytes() == whole[0]
    assert load(folder / CHECKPOINT)[1]["scalars"]["policy/updates"] == len(rows(folder)) == 4


BAD = {
    "no such framework": (["--framework", "jax"], "jax"),
    "a lag with rows that never meet": (["--parallel", "average", "--overlap", "--nprocs", 2], "--overlap collects"),
    "no team evaluates beside": (
        ["--ranks_per_env", 2, "--nprocs", 2, "--eval_every", 9, "--eval_async"], "--eval_async is one process"
    ),
    "deviations of choices": (["CartPole-v1", "--log_std", -2], "--log_std has no effect"),
    "bounds of deviations of choices": (["CartPole-v1", "--std_fall", 1], "--std_fall has no effect"),
    "a team without enough processes": (["--ranks_per_env", 2], "--nprocs 1 is not a multiple of --ranks_per_env 2"),
    "no such function": (["--ranks_per_env", 1], "ENV Hopper-v4: "),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_get_one_line(tmp_path, case):
    arguments, text = BAD[case]
    env = [] if arguments[0] == "CartPole-v1" else ["Hopper-v4"]
    done = train(*env, "-n", 6, "-b", 6, *arguments, "--run_dir", tmp_path / "run", status=2)
    lines = [line for line in done.err.splitlines() if line.startswith("train.py: ")]
    assert len(lines) == 1 and text in lines[0] and "Traceback" not in done.err


@pytest.mark.parametrize(
    "arguments, line",
    [
        ("-b 20 --num_envs 4", "--num_envs has no effect without --batch_steps"),
        ("--batch_steps 100 -b 20", "--batch_size has no effect with --batch_steps"),
        ("--algo trpo --clip 0.2", "--clip has no effect with --algo trpo"),
        ("--algo ppo-kl --clip 0.2", "--clip has no effect with --algo ppo-kl"),
        ("--algo trpo --lr 1e-3", "--lr has no effect with --algo trpo"),
        ("--algo trpo --epochs 2", "--epochs has no effect with --algo trpo"),
        ("--algo vpg --kl_targ 0.1", "--kl_targ has no effect with --algo vpg"),
        ("--nprocs 2 --watchdog 0 --watchdog_kill", "--watchdog_kill has no effect with --watchdog 0"),
        ("--watchdog_kill", "--watchdog_kill has no effect with --nprocs 1"),
        ("--log_dir logs", "--log_dir has no effect with --nprocs 1"),
        ("--env_timeout 3", "--env_timeout has no effect without --env_command or --ranks_per_env"),
        ("--tag_output", "--tag_output has no effect with --nprocs 1"),
        ("--cg_iters 3", "--cg_iters has no effect with --algo ppo"),
        ("--cg_damping 0.1", "--cg_damping has no effect with --algo ppo"),
        ("--eval_episodes 3", "--eval_episodes has no effect without --eval_every"),
        ("--minibatches 4 --minibatch_rows 64", "--minibatch_rows has no effect with --minibatches 4"),
    ],
)
def test_a_setting_without_effect_is_refused(capsys, arguments, line):
    with pytest.raises(SystemExit) as ended:
        parse(["Hopper-v4", *arguments.split()])
    assert ended.value.code == 2 and capsys.readouterr().err == f"train.py: {line}; leave it out (see --help)\n"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("--learning_rate 1e-3", "lr"), ("--n_steps=5", "batch_steps"), ("--total_timesteps 9", "total_steps"),
        ("--hidden 64", "policy_hid_list"), ("--num_workers 2", "nprocs"), ("--gae_lambda 1", "lam"),
        ("--total_stepz 9", "total_steps"), ("--xyz 1", ""),
    ],
)  # fmt: skip
def test_a_name_of_another_program_is_understood(capsys, arguments, meant):
    with pytest.raises(SystemExit) as ended:
        parse(["Hopper-v4", *arguments.split()])
    asks = f"; did you mean --{meant}?" if meant else ""
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"train.py: unrecognized arguments: {arguments}{asks} (see --help)\n"


def test_an_environment_without_a_version_is_the_newest(tmp_path):
    done = train("Hopper", "--total_steps", 2000, "--nprocs", 2, "--run_dir", tmp_path / "run")
    assert "Hopper-v5: ppo, seed 0, 2 processes" in done.out
    assert json.loads((tmp_path / "run" / "config.json").read_text())["env"] == "Hopper-v5"


@pytest.mark.parametrize("env", ["HalfCheetah-v4", "Hopper-v5", "Ant-v5", "Reacher-v5", "InvertedPendulum-v5"])
def test_the_camera_follows_what_runs(env):
    """Of itself Gymnasium 1.4 takes one that stays where it is, and a cheetah leaves the picture."""
    made = make_env(Config(env=env), quiet=True, render_mode="rgb_array").unwrapped
    tracks = "trackbodyid" in (made.mujoco_renderer.default_cam_config or {})
    assert tracks or made.mujoco_renderer.camera_id >= 0


@pytest.mark.skipif(find_spec("wandb") is not None, reason="needs an environment without wandb")
def test_a_missing_package_leaves_no_folder(tmp_path):
    done = train("CartPole-v1", "--wandb", "--run_dir", tmp_path / "run", status=2)
    assert done.err == "train.py: --wandb needs wandb: pip install wandb\n" and not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "arguments", ["", "--batch_steps 400", "--algo trpo --eval_every 9", "--algo vpg", "--algo ppo-kl --minibatches 3"]
)
def test_what_is_not_refused_has_a_value_in_config_json(arguments):
    config = parse(["Hopper-v4", *arguments.split()]).fitted(HOPPER)
    unlimited = {"num_episodes", "total_steps", "run_dir", "resume", "batch_steps", "eval_every", "watchdog"}
    unlimited |= {"hosts", "hostfile", "log_dir", "name", "video_every", "ranks_per_env", "env_command"}
    unlimited |= {"gamma"}  # of ppo: it follows what episodes do
    without = {name for name, value in config.effective.items() if value is None}
    assert without - unlimited == set(config.unused) - unlimited and "lr" in config.effective
    again = Config(**{key: value for key, value in config.effective.items() if value is not None or key == "gamma"})
    assert {**vars(again), **dict.fromkeys(config.unused)} == {**vars(config), **dict.fromkeys(config.unused)}


@pytest.mark.slow
def test_a_framework_that_is_not_installed(tmp_path):
    (tmp_path / "tensorflow.py").write_text(TF_OFF)
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = train("Hopper-v4", "--framework", "tf", "--nprocs", 2, "--run_dir", tmp_path / "run", status=2, env=env)
    assert "; install what train.py needs: pip install -c constraints.txt -e '.[tf]'" in done.err


TWO_BRANCH = ["--network", "examples.two_branch:network"]


@pytest.mark.torch
@pytest.mark.slow
def test_ones_own_network_gives_the_same_bits_and_resumes(tmp_path):
    how = [*EPISODES, *TWO_BRANCH, *BATCH]
    threads = {"OMP_NUM_THREADS": "4"}  # which torch would take on each process
    made = run(tmp_path / "whole", *how, "--nprocs", 3, env=threads)
    assert len(made[1]) == 2
    arrays, notes = load(tmp_path / "whole" / "policy.safetensors")
    assert arrays["policy/positions/0/weight"].shape == (32, 5) and notes["spec"]["network"] == TWO_BRANCH[1]
    run(tmp_path / "parts", *EPISODES[:2], 6, *EPISODES[3:], *TWO_BRANCH, *BATCH)
    train("--resume", tmp_path / "parts", "-n", 12)
    assert ((tmp_path / "parts" / "policy.safetensors").read_bytes(), rows(tmp_path / "parts")) == made


BAD_NETWORKS = {
    "no module": ("no_such_module:network", "No module named 'no_such_module'"),
    "no colon": ("examples.two_branch", "write MODULE:FUNCTION, for a function in"),
    "no function": ("examples.two_branch:nothing", "has no attribute 'nothing'"),
    "another shape": ("tests.envs:wrong_network", "maps (2, 11) to (2, 7); it must be (2, 3)"),
    "no module of torch": ("tests.envs:Moody", "the policy network: "),
    "a path": ("./mynets.py:network", "write MODULE:FUNCTION"),
    "random numbers": ("tests.envs:noisy_network", "on no random numbers"),
    "other rows": ("tests.envs:centred_network", "must depend on its own row alone"),
}


@pytest.mark.torch
@pytest.mark.slow_unless(case="no colon")
@pytest.mark.parametrize("case", BAD_NETWORKS)
def test_a_network_that_cannot_be_used_gets_one_line(tmp_path, case):
    name, line = BAD_NETWORKS[case]
    n = 2 if case in ("no function", "another shape") else 1  # one line also where every rank has the error
    done = train("Hopper-v5", "--nprocs", n, "--network", name, "--run_dir", tmp_path / "run", status=2)
    assert done.err.startswith(f"train.py: --network {name}: ") and line in done.err
    assert len(done.err.splitlines()) == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [["--framework", "numpy"], ["--framework", "tf"], ["--policy_hid_list", "8"]])
def test_ones_own_network_excludes_what_has_no_effect(more, capsys):
    with pytest.raises(SystemExit):
        parse(["Hopper-v4", *TWO_BRANCH, *more])
    assert "--network" in capsys.readouterr().err


def test_auto_is_numpy_on_the_cpu_and_torch_otherwise():
    assert parse(["Hopper-v4"]).framework == "numpy"
    assert parse(["Hopper-v4", "--device", "cuda"]).framework == "torch"
    assert parse(["Hopper-v4", *TWO_BRANCH]).framework == "torch"
    assert parse(["Hopper-v4", "--framework", "tf"]).framework == "tf"
