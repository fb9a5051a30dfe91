"""The training program around the algorithms of `policies`: settings, rollouts, run folder, screen, advice.

It imports `policies` and public names of `mpi_util` and its satellites; only train.py, the tests and the benchmarks
import it. Read `config` first, then `run` (what a rank holds), `collect` (episodes on every rank, and which rank learns
from which rows) and `training` (one update). Ranks that only collect load neither torch nor TensorFlow.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def train(env: str, **settings: Any) -> Path:
    """Trains as train.py does, in processes of its own, whose output comes here; returns the folder of the run.

        folder = train("Hopper-v4", nprocs=4, total_steps=200_000)
        policy = load_policy(folder)  # of trainer.play

    Args: settings: train.py's options, by name; True for an option without a value.
    Raises RuntimeError: it has failed; its own message is on standard error.
    """
    from trainer.run_folder import RunFolder

    default = RunFolder.default_path(env, settings.get("seed", 0), settings.pop("name", None))
    folder = Path(settings.pop("run_dir", None) or default).absolute()
    words = [env, "--run_dir", str(folder)]
    for name, value in settings.items():
        words += (
            [] if value is None or value is False else [f"--{name}"] if value is True else [f"--{name}", str(value)]
        )
    root = Path(__file__).parent.parent
    path = os.pathsep.join([str(root), *filter(None, sys.path)])
    command = [sys.executable, str(root / "train.py"), *words]
    status = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}).returncode  # noqa: S603  # our own program
    if status:
        left = f"; results so far are in {folder}" * folder.exists()
        raise RuntimeError(f"train({env!r}) has ended with status {status}{left}")
    return folder
