"""A run folder from elsewhere runs no code unasked, its links are not followed, and senseless content is one line."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from training import train

from mpi_util_spinup import files
from mpi_util_spinup.play_policy import load_policy_and_env
from policies.actor import init_params
from policies.data_parallel import ALONE
from trainer.command_line import parse
from trainer.play import load_policy
from trainer.rollout import empty_batch
from trainer.run import build_envs
from trainer.run_folder import BEST, CHECKPOINT, POLICY, RunFolder, load
from trainer.training import Training

SEGMENTS = ["CartPole-v1", "--batch_steps", 60, "--num_envs", 3, "--epochs", 1, "--vf_epochs", 1, "--overlap"]
OWN = """
import gymnasium as gym, numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
class Own(CartPoleEnv):
    def render(self):
        return np.full((32, 32, 3), self.steps_beyond_terminated is None, np.uint8)
gym.register("Own-v0", entry_point=Own)
def same(env):
    return env
"""
LOUD = "import pathlib\npathlib.Path(__file__).with_name('imported').touch()\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A place for the key of this user's runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("home")))
        yield patch


@pytest.fixture(scope="module")
def plain(tmp_path_factory, home):
    """Folder of a run of an environment that Gymnasium knows."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    train(*SEGMENTS, "--total_steps", 120, "--run_dir", folder)
    return folder


@pytest.fixture(scope="module")
def own(tmp_path_factory, home):
    """Folder of a run of this user's, of an environment of her own beside it."""
    place = tmp_path_factory.mktemp("own")
    (place / "mine.py").write_text(OWN)
    words = ["mine:Own-v0", "-n", "4", "-b", "4", "--env_wrappers", "mine:same", "--epochs", "1", "--run_dir", "run"]
    start(place, *words)
    return place / "run"


def start(folder: Path, *words, status: int | None = 0):
    """train.py in this folder. Args: status: required; None: any."""
    command = [sys.executable, ROOT / "train.py", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert status in (None, done.returncode), done.stderr
    return done


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def change(folder: Path, **settings) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def refuses(folder: Path) -> str:
    """The line with which --resume refuses it."""
    with pytest.raises(SystemExit):
        parse(["--resume", str(folder)])


# ---- code


@pytest.mark.parametrize("way", ["env", "env_wrappers", "network"])
def test_what_a_folder_from_elsewhere_names_is_not_imported(plain, tmp_path, way, capsys, monkeypatch):
    folder = copied(plain, tmp_path / "run")
    (folder / "evil.py").write_text(LOUD + OWN)
    value = {"env": "evil:Own-v0", "env_wrappers": "evil:same", "network": "evil:same"}[way]
    change(folder, **{way: value, "framework": "torch"})
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        parse(["--resume", "."])
    line = capsys.readouterr().err
    assert ended.value.code == 2 and line.count("\n") == 1 and "config.json would import 'evil' from" in line
    assert f"{folder}/evil.py; no run of yours wrote that; if you trust it: --trust" in line
    arrays, notes = load(folder / POLICY)
    notes = notes | {way: value} if way != "network" else notes | {"spec": notes["spec"] | {way: value}}
    RunFolder(folder, new=False).save(POLICY, arrays, notes)
    with pytest.raises(ValueError, match=r"policy.safetensors would import 'evil' from .*--trust, trust=True$"):
        load_policy(folder)
    assert "evil" not in sys.modules and not (folder / "imported").exists()
    assert parse(["--resume", ".", "--trust"]).modules == ["evil"] and load_policy.__kwdefaults__ == {"trust": False}


def test_the_output_of_a_folder_from_elsewhere_goes_nowhere(plain, tmp_path):
    folder = copied(plain, tmp_path / "run")
    change(folder, log_dir=str(tmp_path / "logs"))
    assert parse(["--resume", str(folder)]).log_dir is None


def test_ones_own_run_is_resumed_without_a_question_where_it_is_moved_to(own, tmp_path):
    place = copied(own.parent, tmp_path / "place")
    line = start(place, "--resume", "run", "-n", "8", status=2).stderr
    assert line.startswith(f"train.py: run/config.json would import 'mine' from {place}/mine.py; ")
    assert "would import 'mine'" in start(place, "--watch", "run", "--episodes", "1", status=2).stderr
    start(place, "--resume", "run", "-n", "8", "--trust")
    start(place, "--resume", "run", "-n", "12")  # by now a run of hers has written it
    (place / "run").rename(place / "moved")
    start(place, "--resume", "moved", "-n", "16")
    start(place, "--watch", "moved", "--episodes", "1")
    change(place / "moved", env_kwargs='{"sutton_barto_reward": true}')
    assert "would import" in start(place, "--resume", "moved", status=2).stderr


def test_a_module_that_others_can_put_into_ones_own_folder_is_not_imported(own, tmp_path, monkeypatch):
    monkeypatch.chdir(own)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (own / "mine.py").write_text(LOUD)
    assert parse(["--resume", "."]).modules == ["mine", "mine"]
    own.chmod(0o777)
    try:
        with pytest.raises(SystemExit):
            parse(["--resume", "."])
    finally:
        own.chmod(0o755)
        (own / "mine.py").unlink()


def test_without_a_key_that_is_the_users_alone_nothing_is_her_own(own, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(own.parent)
    parse(["--resume", "run"])
    for place in (tmp_path / "none", Path("/dev/null")):
        monkeypatch.setenv("XDG_STATE_HOME", str(place))
        with pytest.raises(SystemExit):
            parse(["--resume", "run"])
    (tmp_path / "none" / "mpi_util").chmod(0o755)
    with pytest.raises(SystemExit):
        parse(["--resume", "run"])


@pytest.mark.slow
def test_an_old_folder_that_names_no_module_needs_no_trust(plain, tmp_path, monkeypatch):
    folder = copied(plain, tmp_path / "run")
    assert not (folder / "signature").exists()  # which is of folders that name modules
    monkeypatch.setenv("MPI_UTIL_CURVE", "1")
    change(folder, eval_every=30, eval_async=True, eval_episodes=1)
    for name in ("numpy", "json", "trainer", "multiprocessing", "matplotlib", "mpi_util_spinup", "imageio"):
        (folder / f"{name}.py").write_text("open('imported', 'w')")
    start(folder, "--resume", ".", "--total_steps", "180")
    start(folder, "--watch", ".", "--video", "a.gif", status=None)  # nothing may draw here
    assert not (folder / "imported").exists() and (folder / "learning_curve.png").exists()


# ---- links and FIFOs


def test_no_file_of_a_folder_is_a_link_to_one_of_the_users(plain, tmp_path):
    folder, victim = copied(plain, tmp_path / "run"), tmp_path / "victim"
    victim.write_text("mine")
    for name in (".probe", ".checkpoint.safetensors.new", ".policy.safetensors.new", ".config.json.new", "curve.log"):
        (folder / name).symlink_to(victim)
    draft = folder / ".checkpoint.safetensors.1.new"
    draft.mkdir()
    (draft / CHECKPOINT).symlink_to(victim)
    (folder / "checkpoint-1.safetensors").unlink()
    (folder / "checkpoint-1.safetensors").symlink_to(victim)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (folder / "videos").symlink_to(elsewhere)
    before = elsewhere.stat().st_mtime_ns
    train("--resume", folder, "--total_steps", 180, "--video_every", 60)
    assert elsewhere.stat().st_mtime_ns == before
    assert not draft.exists() and load(folder / CHECKPOINT)[0]["steps"] == 180
    (folder / "checkpoint-1.safetensors").unlink()  # which would take its place
    for name in ("progress.txt", "progress.jsonl", "config.json", CHECKPOINT):
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(victim)
        done = train("--resume", folder, "--total_steps", 240, status=2)
        assert done.err.count("\n") == 1 and "Too many levels of symbolic links" in done.err and name in done.err
        (tmp_path / name).rename(folder / name)
    assert victim.read_text() == "mine"


def test_a_video_is_written_through_no_link(own, tmp_path):
    victim, film = tmp_path / "victim", own / "film.gif"
    victim.write_text("mine")
    film.symlink_to(victim)
    start(own.parent, "--watch", "run", "--video", film)
    assert victim.read_text() == "mine" and film.read_bytes()[:3] == b"GIF" and not film.is_symlink()
    assert not list(own.glob(".*"))


def test_a_fifo_is_one_line_at_once(plain, tmp_path):
    folder = copied(plain, tmp_path / "run")
    (folder / "checkpoint-1.safetensors").unlink()
    for name in ("progress.txt", "progress.jsonl", "config.json", CHECKPOINT, POLICY):
        (folder / name).rename(tmp_path / name)
        os.mkfifo(folder / name)
        words = ["--watch" if name == POLICY else "--resume", folder]
        done = train(*words, status=2, timeout=20)
        assert done.err.count("\n") == 1 and "not a regular file" in done.err and name in done.err
        (folder / name).unlink()
        (tmp_path / name).rename(folder / name)
    for name in ("progress.txt", "config.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    command = [sys.executable, "-m", "mpi_util_spinup.plot", folder, "--out", tmp_path / "a.png"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and "not a regular file" in done.stderr and done.stderr.count("\n") == 1


def test_a_pickle_in_a_fifo_needs_trust_too(tmp_path):
    (tmp_path / "pyt_save").mkdir()
    os.mkfifo(tmp_path / "pyt_save" / "model.pt")
    with pytest.raises(files.UsageError, match=r"model\.pt is a pickle"):
        load_policy_and_env(tmp_path)


def test_a_folder_is_replaced_through_no_link(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    for name in (".save.new", ".save.old"):
        (tmp_path / name).symlink_to(victim)

    def fill(text, draft):
        draft.mkdir()
        (draft / "f").write_text(text)

    for text in "ab":
        files.replace_folder(tmp_path / "save", partial(fill, text))
        assert (tmp_path / "save" / "f").read_text() == text and not list(victim.iterdir())


# ---- content


@pytest.fixture
def checkpoint(plain, tmp_path):
    """checkpoint(change): what a resumed run says of it, with a right checksum; change(arrays, notes): of good ones."""
    folder = copied(plain, tmp_path / "run")
    (folder / "checkpoint-1.safetensors").unlink()
    good, notes = load(folder / CHECKPOINT)
    config = parse(["--resume", str(folder), "--total_steps", "180"])
    _envs, spec = build_envs(config)
    ready = {name: np.zeros((2, *like.shape[1:]), like.dtype) for name, like in empty_batch(spec).items()}
    ready |= {"logp": np.zeros(2, "f4"), "rew_scale": np.ones(1), "seconds": np.ones(4)}
    asked = {name: good[name] for name in good if "/" not in name or name.startswith("scaler")}
    params = init_params(spec, np.random.default_rng(0))
    good |= {f"ready/{name}": array for name, array in ready.items()}
    good |= {f"asked/{name}": array for name, array in (asked | params).items()}

    def said(change, *arguments) -> str:
        arrays = {name: array.copy() for name, array in good.items()}
        changed = json.loads(json.dumps(notes))
        change(arrays, changed, *arguments)
        RunFolder(folder, new=False).save(CHECKPOINT, arrays, changed)
        try:
            Training(config, spec, params, ALONE)
        except ValueError as error:
            assert str(folder) in str(error) and "\n" not in str(error)
            return str(error)
        return ""

    return said


def test_what_a_run_has_saved_is_loaded(checkpoint):
    assert checkpoint(lambda *_: None) == ""


ARRAYS = """steps iteration episodes evaluate rew_scale policy/0/weight policy/adam/m value/adam/v
scaler/run_m2 scaler/count returns/scale episodes/at episodes/ret episodes/act episodes/rew ready/obs
ready/act ready/ep_len ready/work ready/seconds ready/logp asked/steps asked/policy/1/bias"""
NEGATIVE = """steps iteration episodes evaluate rew_scale gamma policy/adam/v value/adam/v scaler/count scaler/run_m2
returns/scale episodes/at episodes/act ready/act ready/ep_len asked/steps"""


@pytest.mark.parametrize("how", ["missing", "dtype", "shape", "rows"])
def test_an_array_that_does_not_fit_is_named(checkpoint, how):
    def change(arrays, notes, name):
        array = arrays.pop(name)
        other = np.int32 if array.dtype.kind == "f" else np.float32
        rows = np.zeros((9, *array.shape[1:]), array.dtype)
        changed = {"dtype": array.astype(other), "shape": array[..., None], "rows": rows}
        if how != "missing":
            arrays[name] = changed[how]

    for name in ARRAYS.split():
        if not (how == "rows" and name in ("ready/ep_len", "ready/work")):  # which may have any number
            line = checkpoint(change, name)
            named = f"{name} in it is" in line or f"it has no {name}" in line
            assert named or (how == "rows" and name.split("/")[0] in line), (name, line)  # or one of the same rows


def test_a_number_out_of_range_is_named(checkpoint):
    for number, names in ((-1, NEGATIVE), (2**62, "steps iteration episodes/at episodes/act")):
        for name in names.split():
            line = checkpoint(lambda arrays, notes, name, number: arrays[name].fill(number), name, number)
            assert f"{name} in it is" in line and "out of range" in line, (name, line)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policy/updates", -1), ("policy/updates", 10**30), ("policy/updates", "5"), ("policy/updates", [1]),
        ("policy/updates", None), ("value/adam/steps", -3), ("time", -1.0), ("time", {}), ("best", "high"),
    ],
)  # fmt: skip
def test_a_scalar_that_is_none_is_named(checkpoint, key, value):
    assert f"{key} in it is" in checkpoint(lambda arrays, notes: notes["scalars"].update({key: value}))


def test_notes_that_make_no_sense_are_one_line(checkpoint):
    def note(arrays, notes, key, value):
        arrays["evaluate"].fill(key == "row")
        notes[key] = value

    for spec in ({}, [], None, {"obs_dim": 4}, "x"):
        assert "belongs to other networks" in checkpoint(note, "spec", spec)
    assert "policy/adam/steps in it is missing" in checkpoint(note, "scalars", {})
    for scalars in (5, [], None, "x"):
        assert "not a file of train.py" in checkpoint(note, "scalars", scalars)
    for row in ([], 5, [["Iteration"]], [["Iteration", "x"]], [["Iteration", 1.5]], None):
        assert "row in it is" in checkpoint(note, "row", row)


def test_weights_that_make_no_sense_are_one_line(plain, tmp_path):
    folder = copied(plain, tmp_path / "run")
    good, notes = load(folder / POLICY)

    def said(arrays, **changed) -> str:
        RunFolder(folder, new=False).save(POLICY, good | arrays, notes | changed)
        with pytest.raises((ValueError, MemoryError)) as error:
            load_policy(folder).runner  # noqa: B018
        return str(error.value)

    assert "policy/0/weight in it is" in said({"policy/0/weight": np.zeros((9, 9), "f4")})
    assert "policy/0/weight in it is" in said({"policy/0/weight": np.zeros((4, 64))})
    assert "scaler/mean in it is" in said({"scaler/mean": np.zeros(1, "f4")})
    spec = notes["spec"]
    for other in ({"obs_dim": -1}, {"obs_dim": 10**15}, {"policy_hid": "x"}, {"act_dim": 2.0}, {"more": 1}):
        assert str(folder) in said({}, spec=spec | other) or other == {"obs_dim": 10**15}
    assert "--env is 5" in said({}, env=5) and "--env_kwargs" in said({}, env_kwargs="[")
    assert "belong to other networks" in said({}, env="MountainCar-v0")
    assert "cannot make environment" in said({}, env="None-v0")


def test_a_new_run_in_a_used_folder_takes_and_loses_nothing_of_the_old_one(plain, tmp_path):
    folder = copied(plain, tmp_path / "run")
    for checkpoint in folder.glob("checkpoint*"):
        checkpoint.unlink()  # to save space
    names = "progress.txt", "progress.jsonl", "config.json", POLICY, BEST
    (folder / BEST).write_bytes((folder / POLICY).read_bytes())
    old = {name: (folder / name).read_bytes() for name in names}
    train("CartPole-v1", "--total_steps", 80, "--batch_steps", 40, "--num_envs", 2, "--run_dir", folder)
    assert {name: (folder / f"{name}.1").read_bytes() for name in names} == old and not (folder / BEST).exists()


def test_columns_of_any_content_are_survived(plain, tmp_path):
    folder = copied(plain, tmp_path / "run")
    for text in ("[1]\n", '{"Episodes": []}\n', '{"Episodes": 1' + "0" * 400 + "}\n", "[" * 9999, "\xff"):
        (folder / "progress.jsonl").write_bytes(text.encode("latin1"))
        train("--resume", folder, "--total_steps", 120)
