"""What train.py writes for other programs is read by them."""

import importlib
import json
import math
import re

import pytest
from conftest import ROOT
from training import train

from trainer import play
from trainer.run_folder import load

POLICIES = ROOT / "examples" / "policies"


@pytest.mark.tensorboard
def test_tensorboard_reads_its_files(tmp_path):
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    work = ["CartPole-v1", "--batch_steps", 64, "--num_envs", 2, "--tensorboard", "--run_dir", tmp_path / "run"]
    train(*work, "--total_steps", 128)
    train("--resume", tmp_path / "run", "--total_steps", 256, "--nprocs", 2)
    reader = accumulator.EventAccumulator(str(tmp_path / "run"))
    reader.Reload()
    rows = [json.loads(line) for line in (tmp_path / "run" / "progress.jsonl").read_text().splitlines()]
    assert {"AverageEpRet", "KL", "StepsPerSecond"} <= set(reader.Tags()["scalars"]) and len(rows) == 4
    for name in reader.Tags()["scalars"]:
        found = {event.step: event.value for event in reader.Scalars(name)}
        there = {row["TotalEnvInteracts"]: row[name] for row in rows if row[name] is not None}
        assert found.keys() == there.keys() and all(math.isclose(found[t], there[t], rel_tol=1e-6) for t in there), name


def test_rows_of_progress_jsonl_are_kept_by_their_numbers(tmp_path):
    """After a full disk one may be missing, or half; after a kill there may be one more than the checkpoint has."""
    folder, work = tmp_path / "run", ["CartPole-v1", "--batch_steps", 64, "--num_envs", 2, "--save_every", 0]
    train(*work, "--total_steps", 320, "--run_dir", folder)
    lines = (folder / "progress.jsonl").read_text().replace('"EpLen"', '"{of a hook}": 1, "EpLen"').splitlines(True)
    (folder / "progress.jsonl").write_text(
        "".join([lines[0], lines[1][:50] + lines[2], *lines[3:], lines[4].replace(": 5,", ": 6,")])
    )
    train("--resume", folder, "--total_steps", 384)
    rows = [json.loads(line)["Iteration"] for line in (folder / "progress.jsonl").read_text().splitlines()]
    assert rows == [1, 4, 5, 6]


@pytest.mark.wandb
def test_weights_and_biases_gets_a_run_that_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    work = [
        "CartPole-v1",
        "--batch_steps",
        64,
        "--num_envs",
        2,
        "--nprocs",
        2,
        "--wandb",
        "--run_dir",
        tmp_path / "run",
    ]
    train(*work, "--total_steps", 128)
    train("--resume", tmp_path / "run", "--total_steps", 192)
    names = {path.name.rpartition("-")[2] for path in (tmp_path / "run" / "wandb").glob("offline-run-*")}
    assert len(names) == 1  # the run's own, of both starts


@pytest.mark.wandb
def test_without_a_key_of_weights_and_biases_nothing_is_begun(tmp_path):
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_MODE": "online", "WANDB_API_KEY": ""}
    done = train("CartPole-v1", "--wandb", "--nprocs", 2, "--run_dir", tmp_path / "run", env=home, status=2)
    assert re.fullmatch(r"train.py: --wandb: .* \(WANDB_MODE=offline needs no login\)\n", done.err)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", sorted(POLICIES.iterdir()), ids=lambda path: path.name)
def test_a_kept_policy_plays_well_and_is_small(path, capsys):
    """Each is what the defaults learned; the least return is far beyond what an untrained policy reaches."""
    least = {"HalfCheetah-v5": 3000.0, "Hopper-v5": 1000.0, "Humanoid-v4": 900.0, "Walker2d-v5": 3000.0}[path.name]
    (file,) = path.iterdir()
    assert file.stat().st_size < 250_000 and load(file)[1]["env"] == path.name
    assert play.main(["--watch", str(path), "--episodes", "1", "--no_window"]) == 0
    assert float(capsys.readouterr().out.split("return ")[1].split(", ")[0].replace(",", "")) > least
    assert path.name in play.listed(POLICIES) and f"{load(file)[1]['test_ret']:,.1f}" in play.listed(POLICIES)
