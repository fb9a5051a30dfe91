"""The values that rank 0 broadcasts with the weights, so that all ranks take the same decisions."""

import numpy as np

STOP, DROPPED = 1, 2  # values of Control.stop: the run ends after this iteration; it ends now, without this iteration


class NotFinite(FloatingPointError):
    """A number of the run is not finite; one line says which. No plain FloatingPointError, as environments raise it."""


class _Integer:
    """An attribute of Control that is kept in an array, which a broadcast overwrites."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, control: "Control", owner: type) -> int:
        return int(control.arrays[self._name][0])

    def __set__(self, control: "Control", value: int) -> None:
        control.arrays[self._name][0] = value


class Control:
    """What rank 0 decides, and how far the run is.

    Attributes:
        stop: 0, STOP or DROPPED.
        evaluate: 1: evaluate the policy after this iteration. In a checkpoint: a stop came before that was done.
        save: 1: write a checkpoint after this iteration.
        iteration, episodes, steps: so far, of all ranks; steps of the environments.
        rew_scale: float64 (1,), the factor of the rewards.
        arrays: dict of name to int64 (1,), and rew_scale: what is broadcast and saved. Overwritten in place.
    """

    stop = _Integer()
    evaluate = _Integer()
    save = _Integer()
    iteration = _Integer()
    episodes = _Integer()
    steps = _Integer()

    def __init__(self, rew_scale: float):
        names = [name for name, value in vars(Control).items() if isinstance(value, _Integer)]
        self.rew_scale = np.array([rew_scale])
        self.arrays = {name: np.zeros(1, np.int64) for name in names} | {"rew_scale": self.rew_scale}
