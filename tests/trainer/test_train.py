"""train.py as its user runs it: the same bits at any size, ends in order, resumes, learns, and refuses bad input."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time

import numpy as np
import pytest
from conftest import ROOT, mpi_environment, run
from training import EPISODES, FRESH, ODD, SEGMENTS, TIME_COLUMNS, rows, start, train, wait_for_row

from policies.actor import Spec
from trainer.command_line import parse
from trainer.config import Config
from trainer.environment import check_env
from trainer.record import Record, python_command
from trainer.run_folder import load

SPEC = Spec(11, 3, False, (64, 64), (64, 64))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Results of each run with one process, made once."""
    made = {}

    def results(arguments: list) -> tuple[bytes, list]:
        key = str(arguments)
        if key not in made:
            folder = tmp_path_factory.mktemp("alone") / "run"
            train(*arguments, "--nprocs", 1, "--run_dir", folder)
            made[key] = (folder / "policy.safetensors").read_bytes(), rows(folder)
        return made[key]

    return results


@pytest.mark.slow_unless(n=3, arguments=[EPISODES, SEGMENTS, FRESH])
@pytest.mark.left_out(n=[2, 4, 10], arguments=[ODD, FRESH])
@pytest.mark.left_out(n=2, arguments=[EPISODES])
@pytest.mark.left_out(n=4, arguments=[SEGMENTS])
@pytest.mark.parametrize("arguments", [EPISODES, SEGMENTS, ODD, FRESH], ids=["episodes", "segments", "odd", "fresh"])
@pytest.mark.parametrize("n", [2, 3, 4, 10])
def test_same_bits_at_any_size(alone, tmp_path, arguments, n):
    train(*arguments, "--nprocs", n, "--run_dir", tmp_path / "run")
    weights, progress = alone(arguments)
    assert (tmp_path / "run" / "policy.safetensors").read_bytes() == weights
    assert rows(tmp_path / "run") == progress and len(progress) >= 3


KEEPS = "a used environment plays .* from step 1 on: it keeps something over reset; --fresh_env makes a new .*"
IS_RANDOM = "a second new environment plays .* from step 1 on: what is random in it must come from reset.*"
GOOD = ("Hopper-v4", "CartPole-v1", "tests.envs:Uneven-v0")
NOT_PLAYED = ("tests.envs:Broken-v0", "None-v0")


@pytest.mark.parametrize(
    ("env", "problem"),
    [("tests.envs:Tiring-v0", KEEPS), ("tests.envs:Unseeded-v0", IS_RANDOM), ("tests.envs:Moody-v0", IS_RANDOM)]
    + [(env, "") for env in GOOD + NOT_PLAYED],
)
def test_an_environment_that_does_not_repeat_an_episode_has_one_line(env, problem, capfd):
    state = np.random.get_state()[1].tobytes()
    check_env(Config(env=env))
    assert re.fullmatch(f"train.py: {env} is not reproducible: {problem}\n" if problem else "", capfd.readouterr().err)
    assert np.random.get_state()[1].tobytes() == state
    check_env(Config(env=env, fresh_env=True))
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_same_bits_under_any_mpi_and_on_any_machines(alone, tmp_path, mpi):
    train(*EPISODES, "--nprocs", 4, "--run_dir", tmp_path / "run", mpi=mpi, env={"MPI_UTIL_MACHINES": "3"})
    assert (tmp_path / "run" / "policy.safetensors").read_bytes() == alone(EPISODES)[0]


def test_resume_of_a_run_at_its_limit_says_what_goes_on_and_changes_nothing(tmp_path):
    train("CartPole-v1", "--total_steps", 1000, "--run_dir", tmp_path / "run")
    before = (tmp_path / "run" / "config.json").read_bytes()
    for more in ((), ("--total_steps", 500)):
        out = train("--resume", tmp_path / "run", *more)
        assert "it has 2,000 steps already; --resume with a higher --total_steps or -n continues it" in out.out
        assert "Ctrl-C" not in out.out
        assert (tmp_path / "run" / "config.json").read_bytes() == before


@pytest.mark.slow
def test_another_seed_gives_other_bits(alone, tmp_path):
    train(*EPISODES, "--seed", 1, "--run_dir", tmp_path / "run")
    assert (tmp_path / "run" / "policy.safetensors").read_bytes() != alone(EPISODES)[0]


@pytest.mark.slow_if(n=1)
@pytest.mark.parametrize("n", [1, 3])
def test_resume_goes_on_to_the_same_bits(alone, tmp_path, n):
    folder = tmp_path / "run"
    train(*EPISODES[:2], 8, *EPISODES[3:], "--run_dir", folder)
    with open(folder / "progress.txt", "a") as file:
        file.write("99\tan iteration after the last checkpoint\n")
    train("--resume", folder, "-n", EPISODES[2], "--nprocs", n)
    weights, progress = alone(EPISODES)
    assert (folder / "policy.safetensors").read_bytes() == weights
    assert rows(folder) == progress


def test_the_run_folder(alone, tmp_path):
    train(*EPISODES, "--run_dir", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["env"] == "Hopper-v4" and config["num_episodes"] == 24 and config["run_dir"] == f"{tmp_path}/run"
    assert (config["lr"], config["epochs"], config["clip"]) == (3e-4, 10, 0.2)
    assert config["num_envs"] is None and config["cg_iters"] is None  # without effect
    assert config["versions"]["numpy"] == np.__version__ and {"python", "torch", "mpi4py"} <= set(config["versions"])
    train("--resume", tmp_path / "run", "--nprocs", 2, "-n", 32)
    resumed = json.loads((tmp_path / "run" / "config.json").read_text())
    commands = [f"Hopper-v4 -n 24 -b 8 --run_dir {tmp_path}/run", f"--resume {tmp_path}/run --nprocs 2 -n 32"]
    assert resumed["commands"] == [f"{python_command()} train.py {words}" for words in commands]
    assert config["commands"] == resumed["commands"][:1]
    assert (config["watchdog_kill"], resumed["watchdog_kill"]) == (None, False)  # no effect with one process
    same = set(config) - {"commands", "nprocs", "num_episodes", "watchdog_kill", "tag_output"}
    assert {key: resumed[key] for key in same} == {key: config[key] for key in same} and resumed["nprocs"] == 2
    arrays, notes = load(tmp_path / "run" / "policy.safetensors")
    assert {"policy/0/weight", "value/0/weight", "policy/log_std", "scaler/mean"} <= set(arrays)
    assert notes["spec"]["obs_dim"] == 11
    header = (tmp_path / "run" / "progress.txt").read_text().splitlines()[0].split("\t")
    asked = (
        "Iteration Episodes TotalEnvInteracts AverageEpRet StdEpRet MinEpRet MaxEpRet EpLen KL Entropy LossPi LossV "
    )
    assert set(asked.split()) | set(TIME_COLUMNS) <= set(header)


def test_the_interpreter_is_named_as_it_can_be_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("here/.venv/bin", "elsewhere/bin"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "python").symlink_to(sys.executable)
    monkeypatch.setattr("trainer.record.PATH", str(tmp_path / "elsewhere" / "bin"))
    for executable, folder, command in [
        ("here/.venv/bin/python", "here", ".venv/bin/python"),
        ("here/.venv/bin/python", "elsewhere", f"{tmp_path}/here/.venv/bin/python"),
        ("elsewhere/bin/python", "here", "python"),
    ]:
        monkeypatch.chdir(tmp_path / folder)
        monkeypatch.setattr(sys, "executable", str(tmp_path / executable))
        assert python_command() == command


@pytest.mark.parametrize(
    "limits, ends",
    [
        ("", "runs until you stop it; --total_steps or -n sets an end"),
        ("-n 24 --total_steps 1000000", "ends once it has 24 episodes or 1,000,000 environment steps"),
    ],
)
def test_it_says_how_it_ends(tmp_path, capsys, monkeypatch, limits, ends):
    monkeypatch.setattr(sys, "argv", ["../repository/train.py"])  # as it was started
    record = Record(parse(["Hopper-v4", *limits.split(), "--nprocs", "2", "--run_dir", f"{tmp_path}/a run"]), SPEC, {})
    record.begin(rows=0)
    record.announce(0, 0, False)
    again = f"{python_command()} ../repository/train.py --resume '{tmp_path}/a run'"
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == f"Hopper-v4: ppo, seed 0, 2 processes, results in {tmp_path}/a run"
    assert (second, third) == (f"{ends}; Ctrl-C saves and stops; to continue:", f"  {again}")
    record.finish("stopped", 3, 4000)
    stopped, play, more = capsys.readouterr().out.splitlines()
    assert stopped == "stopped: 3 iterations, 4,000 steps in 0:00; weights in policy.safetensors"
    assert play == f"  play:     {again.replace('--resume', '--watch')}" and more == f"  continue: {again}"
    record.best = 12.34
    record.finish("done", 3, 4000)
    done, _, more = capsys.readouterr().out.splitlines()
    assert done == "done: 3 iterations, 4,000 steps in 0:00; weights in best.safetensors, evaluated 12.3"
    assert more == f"  continue: {again}" + " --total_steps N -n N" * bool(limits)
    record.finish("stopped", 3, 4000, saved=False)
    assert capsys.readouterr().out == "stopped: 3 iterations, 4,000 steps in 0:00; the last save failed\n"


@pytest.mark.slow_unless(n=3, signum=[signal.SIGINT])
@pytest.mark.left_out(mpi="openmpi", signum=signal.SIGHUP)
@pytest.mark.left_out(n=1, signum=signal.SIGINT)
@pytest.mark.parametrize("signum, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize(("mpi", "n"), [("mpich", 1), ("mpich", 3), ("openmpi", 3)], indirect=["mpi"])
def test_a_signal_ends_the_run_in_order(tmp_path, mpi, n, signum, status):
    folder = tmp_path / "run"
    process = start(folder, n, mpi)
    process.send_signal(signum)
    out, err = process.communicate(timeout=20)
    assert process.returncode == status
    assert re.search(r"^stopped: ", out, re.M) and "Traceback" not in err
    last = rows(folder)[-1]
    assert load(folder / "checkpoint.safetensors")[0]["iteration"] == int(last["Iteration"])


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_a_background_job_ignores_the_ctrl_c_of_its_shell(tmp_path, n):
    process = start(tmp_path / "run", n, before="trap '' INT")
    process.send_signal(signal.SIGINT)
    wait_for_row(process, 4)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_a_run_needs_no_output(tmp_path, n):
    """Its reader has gone after the first line; or there is none, and the disk of the other stream is full."""
    streams = "2>&- | head -1" if n == 1 else ">/dev/full 2>&-"
    folder = tmp_path / "run"
    command = [sys.executable, "train.py", "InvertedPendulum-v4", "--nprocs", n, "-b20", "-n60", "--run_dir", folder]
    done = run(["bash", "-c", f'set -o pipefail; "$@" {streams}', "-", *command], 60)
    assert done.status == 0 and not done.err and len(rows(folder)) == 3


def on_terminal(columns: int, *arguments, env: dict | None = None, then: int = 0) -> tuple[int, list[str]]:
    """train.py on a terminal. Returns: its status, and the lines that it wrote, with escape codes.

    Args: then: its columns after it has written the first panel.
    """
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "train.py", *map(str, arguments)]
    everywhere = {**os.environ, **mpi_environment("mpich"), **(env or {}), "TERM": "xterm"}
    process = subprocess.Popen(command, cwd=ROOT, env=everywhere, stdin=side, stdout=side, stderr=side)
    os.close(side)
    shown = b""
    with contextlib.suppress(OSError):  # EIO, when the last process has closed it
        while chunk := os.read(main, 4096):
            shown += chunk
            if then and "╯".encode() in shown:
                fcntl.ioctl(main, termios.TIOCSWINSZ, struct.pack("HHHH", 24, then, 0, 0))
    os.close(main)
    return process.wait(20), shown.decode().split("\r\n")


@pytest.mark.slow_unless(n=2, columns=60)
@pytest.mark.parametrize("columns, width", [(40, 96), (60, 59), (200, 100)])
@pytest.mark.parametrize("n", [1, 2])
def test_the_panel_fits_the_terminal(tmp_path, n, columns, width):
    """On a terminal too narrow for it there is a table."""
    status, lines = on_terminal(columns, *EPISODES, "--nprocs", n, "--run_dir", tmp_path / "run")
    plain = [re.sub(r"\x1b\[[\d;?]*\w", "", line.split("\r")[-1]) for line in lines]
    table = [line for line in plain if re.match(r" +(iter|\d+) ", line)]
    frames = [line for line in plain if line[:1] in tuple("╭│╰")]
    assert status == 0 and {len(line) for line in table + frames} == {width} and bool(table) == (columns < 50)
    if frames:
        last = "\n".join(frames[-9:])
        for words in ("Hopper-v4, ppo, seed 0", "progress", "24 of 24 episodes", "100%", "return", "steps/s", "done"):
            assert words in last, last
        assert "idle" in last or n == 1


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_the_panel_follows_a_terminal_that_becomes_narrower(tmp_path, n):
    """A line of the last drawing is two by then, so the next one begins twice as many further up."""
    status, lines = on_terminal(90, *EPISODES, "--nprocs", n, "--run_dir", tmp_path / "run", then=60)
    plain = [re.sub(r"\x1b\[[\d;?]*\w", "", line.split("\r")[-1]) for line in lines]
    tops = [i for i, line in enumerate(plain) if line[:1] == "╭"]
    widths = [len(plain[i]) for i in tops]
    assert status == 0 and set(widths) == {89, 59} and widths == sorted(widths, reverse=True)
    first = widths.index(59)
    rows_before = tops[first] - tops[first - 1]  # the bottom of a drawing and the top of the next one are in one line
    assert f"\x1b[{2 * rows_before}A" in lines[tops[first]]


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_a_crash_leaves_the_terminal_as_it_was(tmp_path, n):
    status, lines = on_terminal(80, "tests.envs:Broken-v0", "--nprocs", n, "--run_dir", tmp_path / "run")
    assert status == 1 and any("the simulator fell over" in line for line in lines)
    assert "\x1b[?25l" not in "".join(lines)  # which hides the cursor


@pytest.mark.slow
def test_a_run_that_was_killed_at_once_can_be_resumed(tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "train.py", "Hopper-v4", "--run_dir", str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.kill()
    process.wait()
    train("--resume", folder, "-n", 20)
    assert len(rows(folder)) == 1


def test_a_crash_loses_no_finished_work(tmp_path):
    folder = tmp_path / "run"
    train(*EPISODES[:2], 8, *EPISODES[3:], "--run_dir", folder)
    good = (folder / "checkpoint.safetensors").read_bytes()
    command = [sys.executable, "train.py", "--resume", str(folder), "-n", "100000", "--nprocs", "2"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    while not process.stdout.readline().startswith("     3 "):
        pass
    process.kill()
    process.wait()
    time.sleep(0.5)
    kept = (folder / "checkpoint.safetensors").read_bytes() == good
    assert kept


def test_an_exception_names_rank_phase_and_episode(tmp_path):
    done = train("tests.envs:Broken-v0", "--nprocs", 2, "--run_dir", tmp_path / "run", status=1)
    assert done.err.count("Traceback") == 1 and "the simulator fell over" in done.err
    assert "(phase rollout, episode " in done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken, n, more",
    [
        ("step OSError", 2, []),
        ("reset FloatingPointError", 1, []),
        ("step ValueError", 1, ["--batch_steps", 40]),
        ("reset OSError", 1, ["--batch_steps", 40]),
    ],
)
def test_an_environments_exception_is_no_bad_input(tmp_path, broken, n, more):
    arguments = ["tests.envs:Broken-v0", "--nprocs", n, *more, "--run_dir", tmp_path / "run"]
    done = train(*arguments, env={"BROKEN": broken}, status=1)
    lines = done.err.splitlines()
    assert re.match(r"(rank \d|mpi_util) \(phase rollout, episode [\d/]+\): uncaught exception$", lines[0])
    assert done.err.count("Traceback") == 1 and "train.py: " not in done.err
    assert f"{broken.split()[1]}: the simulator fell over" in lines


@pytest.mark.slow
def test_an_exception_in_an_evaluation_names_it(tmp_path):
    for place in ("step", "init", "reset"):
        (tmp_path / place).touch()
    arguments = ["tests.envs:Walk-v0", "--eval_every", 100, "--run_dir", tmp_path / "run"]
    done = train(*arguments, env={"FLAKY": str(tmp_path)}, status=1)
    assert re.match(r"mpi_util \(phase evaluate, episode \d+\): uncaught exception\n", done.err)


FAKE = """import os, time
if ("MPI_UTIL_JOB" in os.environ) == {in_rank}:
    os.write(1, b"importing\\n")  # in one piece
    time.sleep(60)
class Any(type):
    def __getattr__(cls, name):
        return cls
class Thing(metaclass=Any):  # whatever the importing module does with it
    pass
def __getattr__(name):
    return Thing
"""


@pytest.mark.slow
@pytest.mark.parametrize("signum, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("in_rank", [False, True])
def test_a_signal_during_the_imports(tmp_path, in_rank, signum, status):
    (tmp_path / "gymnasium.py").write_text(FAKE.format(in_rank=in_rank))
    process = subprocess.Popen(
        [sys.executable, "train.py", "Hopper-v4", "--nprocs", "2", "--run_dir", tmp_path / "run"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signum)
    out, err = process.communicate(timeout=20)
    assert process.returncode == status and len(err.splitlines()) <= 1 and set(out.split()) <= {"importing"}, err
    assert not (tmp_path / "run").exists()


BAD_INPUT = {
    "unknown environment": (["NoSuchEnv-v0"], 2, "doesn't exist. One of your own: MODULE:NoSuchEnv-v0"),
    "unknown module": (["no.such.module:Env-v0"], 2, "no.such.module"),
    "wrong argument": (["Hopper-v4", "--env_kwargs", '{"wings": 2}'], 2, "wings"),
    "no JSON": (["Hopper-v4", "--env_kwargs", "{wings: 2}"], 2, "--env_kwargs"),
    "no process": (["Hopper-v4", "--nprocs", 0], 2, "--nprocs is 0"),
    "more ranks than environments": (["Hopper-v4", "--batch_steps", 100, "--num_envs", 1], 2, "--batch_steps 102"),
    "segments that do not divide": (["Hopper-v4", "--batch_steps", 100, "--num_envs", 3], 2, "multiple"),
    "bad layers": (["Hopper-v4", "--policy_hid_list", "__import__('os')"], 2, "hidden layers"),
    "unknown algorithm": (["Hopper-v4", "--algo", "sarsa"], 2, "sarsa"),
    "no such device": (["Hopper-v4", "--device", "cuda:77"], 2, "--device cuda:77"),
    "deviation beyond all numbers": (["Hopper-v4", "--log_std", "nan"], 2, "--log_std is nan"),
    "negative count": (["Hopper-v4", "-n", -3], 2, "--num_episodes"),
    "infinite step": (["Hopper-v4", "--lr", "inf"], 2, "--lr is inf; it must be a finite number"),
    "negative time": (["Hopper-v4", "--watchdog", -1], 2, "--watchdog is -1.0; it must be 0 or more"),
    "nothing": ([], 2, "environment"),
    "nothing to resume": (["--resume", "/nowhere/run"], 2, "/nowhere/run"),
}


@pytest.mark.slow_unless(case=["unknown environment", "no process", "bad layers", "nothing to resume"])
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gets_one_line(tmp_path, case):
    arguments, status, text = BAD_INPUT[case]
    more = [] if "--nprocs" in arguments else ["--nprocs", 3]
    folder = [] if "--resume" in arguments else ["--run_dir", tmp_path / "run"]
    done = train(*arguments, *more, *folder, status=status)
    lines = [line for line in done.err.splitlines() if "Warning" not in line and "logger.deprecation" not in line]
    assert lines[0].startswith("train.py: ") and text in lines[0]
    assert len(lines) == 1, lines


@pytest.mark.slow
def test_the_policy_of_a_run_folder_can_be_evaluated(tmp_path):
    folder = tmp_path / "run"
    train(*EPISODES[:2], 8, *EPISODES[3:], "--run_dir", folder)
    done, again = (train("--watch", path, "--episodes", 2) for path in (folder, folder / "policy.safetensors"))
    assert done.out == again.out
    first, _no_display, *lines = done.out.splitlines()
    assert first == f"Hopper-v4, weights of {folder}/policy.safetensors"
    assert [line.split(":")[0] for line in lines[:2]] == ["episode 1", "episode 2"]
    returns = [float(line.split()[3].rstrip(",")) for line in lines[:2]]
    assert float(lines[2].split()[2].rstrip(",")) == pytest.approx(np.mean(returns), abs=0.11)
    nothing = train("--watch", tmp_path / "none", status=2)
    assert nothing.err.startswith("train.py: cannot load") and nothing.err.count("\n") == 1


BAD_CONFIG = {
    "not JSON": ("{", "CONFIG is not JSON: Expecting property name"),
    "binary": (b"\xff\xfe", "CONFIG is not JSON: 'utf-8' codec"),
    "a list": ([1], "CONFIG: it is not a JSON object of settings"),
    "a string": ({"batch_size": "x"}, "CONFIG: batch_size is 'x'; it must be a whole number"),
    "a bool": ({"seed": True}, "CONFIG: seed is True; it must be a whole number"),
    "a float": ({"total_steps": 1e6}, "CONFIG: total_steps is 1000000.0; it must be a whole number"),
    "null": ({"threads": None}, "CONFIG: threads is null; it must be a whole number"),
    "no environment": ({"env": None}, "CONFIG: env is null; it must be a string"),
    "a number": ({"policy_hid_list": 64}, "CONFIG: policy_hid_list is 64; it must be a string"),
    "layers": ({"valfunc_hid_list": "64;64"}, "CONFIG: hidden layers of the value network: '64;64'; expected positive"),
    "out of range": ({"gamma": 2}, "CONFIG: gamma is 2; it must be between 0 and 1"),
    "not a choice": ({"algo": "sarsa"}, "CONFIG: algo is 'sarsa'; it must be ppo or ppo-kl or trpo or vpg"),
    "a list for a choice": ({"framework": ["tf"]}, "CONFIG: framework is ['tf']; it must be a string"),
    "unknown": ({"batchsize": 8}, "CONFIG: batchsize is no setting of this version of train.py"),
    "commands": ({"commands": 5}, "CONFIG: commands must be a list of strings"),
    "environment's arguments": ({"env_kwargs": "[1]"}, "CONFIG: env_kwargs '[1]' is not a JSON object"),
}


@pytest.mark.parametrize("case", BAD_CONFIG)
def test_a_damaged_config_is_refused(tmp_path, capsys, case):
    content, line = BAD_CONFIG[case]
    path = tmp_path / "config.json"
    if isinstance(content, dict):
        content = (
            Config(env="Hopper-v4", kl_targ=0.02, gamma=1).effective | {"versions": {}, "commands": ["a"]} | content
        )
    path.write_bytes(
        content if isinstance(content, bytes) else str(content if content == "{" else json.dumps(content)).encode()
    )
    before = path.read_bytes()
    with pytest.raises(SystemExit) as ended:
        parse(["--resume", str(tmp_path)])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.count("\n") == 1 and path.read_bytes() == before
    assert err.startswith(f"train.py: cannot resume: {line}".replace("CONFIG", str(path))), err


def test_a_config_with_settings_without_effect_is_resumed(tmp_path):
    first = Config(env="Hopper-v4", watchdog=0.0, nprocs=3, framework="numpy")
    (tmp_path / "config.json").write_text(json.dumps(first.effective | {"versions": {}, "commands": []}))
    resumed = parse(["--resume", str(tmp_path), "--watchdog", "9"])
    assert resumed.effective | {"watchdog": 0.0, "watchdog_kill": None} == first.effective
    assert resumed.watchdog_kill is False


def test_a_run_of_an_older_version_goes_on_as_it_began(tmp_path):
    settings = Config.of(env="Hopper-v4", framework="numpy").effective | {"vf_replay": False}
    assert settings.pop("std_fall", 1) is None  # a setting that it did not have
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert parse(["--resume", str(tmp_path)]).std_fall == 0.0


def test_a_run_of_an_older_version_is_repeated_as_it_was(tmp_path):
    for std_fall in ({}, {"std_fall": 1.5}):
        settings = Config.of(env="Hopper-v4", framework="numpy").effective | {
            "vf_replay": False,
            "commands": ["a"],
            "log_std": -1.0,
        }
        del settings["std_fall"]
        (tmp_path / "config.json").write_text(json.dumps(settings | std_fall))
        again = ["--config", str(tmp_path / "config.json"), "--seed", "1"]
        assert parse(again).std_fall == std_fall.get("std_fall", 0.0)
        assert parse([*again, "--std_fall", "2"]).std_fall == 2.0
    (tmp_path / "config.json").write_text(json.dumps(settings | {"log_std": None, "std_fall": 2.5}))
    assert parse(again).std_fall is None  # of discrete actions, with which it would be refused


@pytest.mark.slow
def test_nothing_is_overwritten(alone, tmp_path):
    folder = tmp_path / "run"
    train(*EPISODES, "--run_dir", folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = train(*EPISODES, "--run_dir", folder, status=2)
    assert f"{folder} holds a run already" in done.err and "--resume" in done.err
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_an_unwritable_run_folder(tmp_path):
    (tmp_path / "file").touch()
    done = train(*EPISODES, "--nprocs", 2, "--run_dir", tmp_path / "file" / "run", status=2)
    assert done.err.splitlines()[-1].startswith("train.py: cannot write to the run folder")


def test_one_process_needs_no_mpi(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no MPI here')")
    train(*EPISODES, "--run_dir", tmp_path / "run", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})


def test_what_mujoco_warns_of_is_printed_once(tmp_path):
    """HalfCheetah's model has an attribute that MuJoCo 4 calls deprecated, in C, whenever it compiles it."""
    command = [sys.executable, ROOT / "train.py", "HalfCheetah-v5", "--nprocs", 2, "--total_steps", 64]
    done = run([*command, "--batch_steps", 64, "--num_envs", 4], 60, cwd=tmp_path)
    once = run([sys.executable, "-c", "import gymnasium; gymnasium.make('HalfCheetah-v5')"], 60, cwd=tmp_path)
    counts = [(text.err + text.out).count("WARNING: ") for text in (done, once)]
    assert done.status == 0 and counts[0] == counts[1] <= 1, done.err


def test_help_is_grouped_and_short():
    out = train("--help").out
    assert all(group in out for group in ("the run:", "the batch:", "the algorithm:", "the networks:"))
    assert max(map(len, out.splitlines())) <= 110


@pytest.mark.slow
def test_cartpole_is_learned(tmp_path):
    train("CartPole-v1", "--nprocs", 2, "--total_steps", 60_000, "--run_dir", tmp_path / "run", timeout=180)
    best = max(float(row["AverageEpRet"]) for row in rows(tmp_path / "run"))
    assert best > 300  # an untrained policy gets 22, and never more than 60 on average over an iteration
