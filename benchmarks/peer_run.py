"""The folder of a run of a peer's program: a progress.txt like train.py's, and a state to continue from. No mpi_util.

The programs that use it run in interpreters of their own: sb3_humanoid.py, envpool_humanoid.py. What continues is the
training: weights, optimizer, scales. Environments begin new episodes, so unlike train.py's its bits are not the same.
"""

import argparse
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

COLUMNS = ("Time", "TotalEnvInteracts", "Episodes", "AverageEpRet")
SAVE_EVERY_S = 30


def command_line(doc: str) -> argparse.Namespace:
    """The options that these programs have in common."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the run; one that has begun is continued")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10_000_000, help="of the environment, in all")
    return parser.parse_args()


class PeerRun:
    """A run.

    Attributes:
        stop: SIGTERM or SIGINT came: save, and end.
        steps: made before this start.
        checkpoint: folder with what `save` wrote last; None: the run is new.
        returns: of the episodes that have ended since the last row; the program appends to it.
    """

    def __init__(self, folder: Path):
        self.folder, self.stop, self.returns = folder, False, []
        folder.mkdir(parents=True, exist_ok=True)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: setattr(self, "stop", True))
        state = folder / "state.json"
        saved = json.loads(state.read_text()) if state.exists() else {"time": 0.0, "steps": 0, "episodes": 0}
        self.steps, self.episodes = saved["steps"], saved["episodes"]
        self.checkpoint = folder / saved["checkpoint"] if "checkpoint" in saved else None
        self.began = self.saved_at = time.perf_counter()
        self.began -= saved["time"]
        self._drop_rows_after(self.steps)

    def _drop_rows_after(self, steps: int) -> None:
        path = self.folder / "progress.txt"
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        kept = [line for line in lines if line.count("\t") == 3 and int(line.split("\t")[1]) <= steps]
        path.write_text("".join(f"{line}\n" for line in ("\t".join(COLUMNS), *kept)))

    def row(self, steps: int) -> None:
        """Writes a row of progress.txt. Args: steps: in all."""
        self.episodes += len(self.returns)
        mean = sum(self.returns) / len(self.returns) if self.returns else float("nan")
        self.returns.clear()
        with open(self.folder / "progress.txt", "a") as file:
            file.write(f"{time.perf_counter() - self.began:.3f}\t{steps}\t{self.episodes}\t{mean:.3f}\n")

    def due(self) -> bool:
        """Whether it is time to save."""
        return self.stop or time.perf_counter() - self.saved_at > SAVE_EVERY_S

    def save(self, steps: int, write: Callable[[Path], None]) -> None:
        """Saves a state after a row. Args: write: writes files into a folder."""
        folder = self.folder / f"checkpoint-{steps}"
        shutil.rmtree(folder, ignore_errors=True)  # of a start that was killed in here
        folder.mkdir()
        write(folder)
        now = time.perf_counter()
        state = {"checkpoint": folder.name, "time": now - self.began, "steps": steps, "episodes": self.episodes}
        draft = self.folder / "state.json.new"
        draft.write_text(json.dumps(state))
        os.replace(draft, self.folder / "state.json")
        for old in self.folder.glob("checkpoint-*"):
            if old != folder:
                shutil.rmtree(old)
        self.saved_at = now
