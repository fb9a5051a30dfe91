"""--hook MODULE:FUNCTION, on rank 0: the user's function, called with each row of progress.txt before it is written."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from policies.hyper import users_function
from trainer.config import Config

SCHEDULED = ("lr", "vf_lr", "kl_targ", "clip", "ent_coef", "epochs", "vf_epochs")  # which each update reads again


class Hook:
    """What the function gets as `run`.

    Attributes: config: the settings, with those that it has changed. folder: of the run. state: a dict of its own, of
    what JSON can hold, which checkpoints keep.
    """

    def __init__(self, config: Config, folder: Path, saved: Mapping[str, Any]):
        """Args: saved: what a checkpoint keeps; {}: new. Raises ValueError: one line: there is no function."""
        self._function = users_function("--hook", config.hook)
        self.config, self.folder, self.changed, self.stopped = config, folder, dict[str, Any](), False
        self.state: dict[str, Any] = dict(saved.get("state", {}))
        self.set(**saved.get("changed", {}))

    def set(self, **settings: Any) -> None:
        """Changes settings, from the next update on. ValueError, one line: one cannot change, or not to this value."""
        if wrong := sorted(settings.keys() - SCHEDULED):
            raise ValueError(f"--hook cannot change {wrong[0]}; it can change {', '.join(SCHEDULED)}")
        settings = {k: value.item() if hasattr(value, "item") else value for k, value in settings.items()}
        self.config = replace(self.config, **settings).check()
        self.changed |= settings

    def stop(self) -> None:
        """Ends the run after this row, without the evaluation that is made at a limit."""
        self.stopped = True

    def columns(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Calls the function. Returns: the columns that it has added. Raises: what it raises; TypeError: no number."""
        given = dict(row)
        self._function(self, given)
        self.state = json.loads(json.dumps(self.state))  # as a resumed run finds it
        return {name: float(given[name]) for name in given if name not in row}
