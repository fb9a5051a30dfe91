"""What is seen: the panel in its width, the curve after a resume, the list of runs, a video's progress."""

import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from training import train

from trainer import display, play
from trainer.config import Config
from trainer.display import BARS, Display, Panel

ROW = {"Iteration": 900, "TotalEnvInteracts": 1_802_000, "Episodes": 1800, "AverageEpRet": 12_345.6, "EpLen": 1000.0}
ROW |= {"AverageTestEpRet": 11_000.0, "KL": 0.0123, "Entropy": -12.34, "LossV": 123.4, "StepsPerSecond": 12_345.0}
ROW |= {"RolloutS": 1.0, "GatherS": 0.1, "UpdateS": 0.8, "BcastS": 0.1, "IdleShare": 0.5}
POLICIES = ROOT / "examples" / "policies"


def plain(text: str) -> list[str]:
    return re.sub(r"\x1b\[[\d;?]*\w", "", text).rstrip("\r").split("\n")


def longest() -> Panel:
    config = Config.of(env="HumanoidStandup-v5", total_steps=10_000_000, nprocs=10, eval_every=100, batch_steps=2000)
    panel = Panel(config)
    panel.begin(0, 0, 0.0)
    panel._began -= 36_000.0
    for i in range(40):
        panel.show(ROW | {"AverageEpRet": 300.0 * i}, {"AverageEpRet": 12_345.6})
    return panel


@pytest.mark.parametrize("width", [50, 60, 80, 100, 200])
def test_the_panel_does_not_wrap(monkeypatch, width):
    monkeypatch.setattr(display, "columns", lambda: width)
    lines = plain(longest().draw())
    assert {len(line) for line in lines} == {min(width - 1, 100)} and len(lines) == 9
    if width >= 80:
        assert re.search(r"progress +1,802,000 of 10,000,000 steps  ━+  18%  4\d:\d\d:\d\d left", lines[1])
    assert "…" not in lines[1] or width < 60


def test_the_curve_goes_on_after_a_resume(monkeypatch):
    monkeypatch.setattr(display, "columns", lambda: 100)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(display.os, "isatty", lambda _: True)
    monkeypatch.delenv("MPI_UTIL_JOB", raising=False)
    shown = Display(Config.of(env="Hopper-v4", total_steps=2_000_000))
    for i in range(8):
        shown.before(ROW | {"Episodes": 10 * i, "AverageEpRet": float(i)})
    shown.begin(1_802_000, 75, 0.0)  # 5 of them wait for their update, whose row comes next
    text = "\n".join(plain(shown.panel.draw()))
    assert BARS in text and "7.0" in text  # eight rising values, one bar each
    assert shown.before(ROW | {"Episodes": 75, "AverageEpRet": 1000.0})["AverageEpRet"] > 60


def test_a_folder_of_runs_is_listed(tmp_path, capsys):
    for name in ("one", "more/two"):
        train("CartPole-v1", "--total_steps", 128, "--batch_steps", 64, "--num_envs", 2, "--run_dir", tmp_path / name)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "policy.safetensors").write_bytes(b"nothing")
    assert play.main(["--watch", str(tmp_path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "environment", "steps", "return"] and len(lines) == 2
    for line, name in zip(lines, ("more/two", "one")):
        found = re.fullmatch(rf"{name} +CartPole-v1 +128 +([\d.]+)  python (\S+) --watch (\S+)", line)
        assert found and Path(found[3]) == tmp_path / name
    with pytest.raises(SystemExit):
        play.main(["--watch", str(tmp_path / "nix")])
    assert "nix" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Film:
    def append_data(self, picture) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("out", [Terminal, io.StringIO])
def test_a_video_shows_its_progress_on_a_terminal_only(tmp_path, monkeypatch, out):
    folder = tmp_path / "run"
    train("Pendulum-v1", "--total_steps", 400, "--batch_steps", 200, "--num_envs", 1, "--run_dir", folder)
    monkeypatch.setattr(play, "SHOWN_S", 0.0)
    monkeypatch.setattr(play, "publish", lambda *_: None)
    monkeypatch.setattr(play, "_filmed", lambda policy, *_: (policy.make_env(), 20, Film()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gymnasium.Env.render", lambda self: np.zeros((2, 2, 3), np.uint8), raising=False)
        patch.setattr(play.gym.Wrapper, "render", lambda self: np.zeros((2, 2, 3), np.uint8))
        patch.setattr(sys, "stdout", shown := out())
        assert play.main(["--watch", str(folder), "--video", str(tmp_path / "a.gif")]) == 0
    text = shown.getvalue()
    assert ("\x1b[Kvideo: step 180 of 200" in text) == (out is Terminal) and ("\x1b" in text) == (out is Terminal)
    assert plain(text.replace("\r", "\n"))[-2].startswith("video: ") and "episode 1: return" in text


def test_an_export_says_what_it_needs(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    folder = tmp_path / "run"
    train("CartPole-v1", "--total_steps", 64, "--batch_steps", 64, "--num_envs", 2, "--run_dir", folder)
    monkeypatch.setattr(play.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"^to_onnx needs onnx and onnxscript: pip install onnx onnxscript$"):
        play.load_policy(folder).to_onnx(tmp_path / "policy.onnx")
