"""Spinning Up's experiments, `spinup.utils.run_utils`: a function runs once, or for every combination of arguments.

This runs in the process that the user started; experiment.py starts the others.
"""

import functools
import itertools
import json
import operator
import os
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from mpi_util.errors import UsageError, whole_number
from mpi_util.ranks import failure

from .experiment import DEFAULT_DATA_DIR, Experiment, ExperimentError, Result, Schedule, Thunk, setup_logger_kwargs
from .serialization_utils import convert_json
from .table import colored, say

__all__ = [
    "DEFAULT_DATA_DIR", "ExperimentError", "ExperimentGrid", "Result", "all_bools", "call_experiment",
    "setup_logger_kwargs", "valid_str",
]  # fmt: skip


def call_experiment(
    exp_name: str, thunk: Thunk, seed: int = 0, num_cpu: int | str = 1, data_dir: str | os.PathLike[str] | None = None,
    datestamp: bool = False, **kwargs: Any,
) -> Result:  # fmt: skip
    """Runs `thunk(logger_kwargs=..., seed=seed, **kwargs)` in a subprocess, on `num_cpu` ranks, and waits for it.

    Args:
        exp_name: in the name of the run's folder.
        seed: in that name too, and an argument of the function.
        thunk: any function, which cloudpickle takes to the subprocess.
        num_cpu: number of ranks; "auto": one for each core that this process may use.
        data_dir: with `datestamp` for `setup_logger_kwargs`, whose result is `logger_kwargs` if none are given.
        kwargs: of the function. `env_name` becomes `env_fn`, a function that makes that Gymnasium environment, which
            this script may have registered. Where the function's modules import gym and not Gymnasium, it is gym's,
            in the API before 0.26, as Spinning Up's algorithms need it.
    Returns its Result; raises what `ExperimentGrid.run` does.
    """
    failure.install()
    where = setup_logger_kwargs(exp_name, seed, data_dir, datestamp)
    experiment = Experiment(exp_name, thunk, num_cpu, where, kwargs | {"seed": seed}, at_once=1)
    say(f"{experiment.name}: {json.dumps(experiment.config, indent=4, sort_keys=True)}\n")
    return Schedule([experiment]).run()[0]


class ExperimentGrid:
    """Runs an experiment for every combination of the values of its parameters.

        grid = ExperimentGrid("ppo")
        grid.add("seed", [0, 10, 20])
        grid.add("env_name", "Hopper-v4", in_name=True)
        grid.add("ac_kwargs:hidden_sizes", [(32,), (64, 64)], "hid")
        grid.run(ppo, num_cpu=2, max_parallel=3)

    Its `keys`, `vals`, `shs` and `in_names` are what `add` was given, for each parameter.
    """

    def __init__(self, name: str = ""):
        failure.install()
        self.keys, self.shs = list[str](), list[str]()
        self.vals, self.in_names = list[list[Any]](), list[bool]()
        self.name(name)

    def name(self, _name: str) -> None:
        """Sets the grid's name, with which the names of its variants begin."""
        if not isinstance(_name, str):
            raise UsageError(f"the name of an ExperimentGrid must be a string; got {_name!r}")
        self._name = _name

    def add(self, key: str, vals: Any, shorthand: str | None = None, in_name: bool = False) -> None:
        """Adds a parameter. Raises UsageError: an empty list; a key that is no string, or sets the same argument twice.

        Args:
            key: name of the function's argument; "ac_kwargs:hidden_sizes": an item of its argument ac_kwargs, a dict.
            vals: list of the values to try; anything else is the only value.
            shorthand: of the key, for the names of variants; None: the first three letters of each part.
            in_name: the value is in the names of variants even if it is the only one.
        """
        if not isinstance(key, str) or not (shorthand is None or isinstance(shorthand, str)):
            raise UsageError(f"ExperimentGrid.add: key and shorthand must be strings; got {key!r}, {shorthand!r}")
        vals = vals if isinstance(vals, list) else [vals]
        if not vals:
            raise UsageError(f"ExperimentGrid.add: '{key}' has no value; give at least one")
        for other in self.keys:
            if other == key or other.startswith(f"{key}:") or key.startswith(f"{other}:"):
                raise UsageError(f"ExperimentGrid.add: '{key}' and '{other}' set the same argument")
        self.keys.append(key)
        self.vals.append(vals)
        default = "-".join(re.sub("[^a-zA-Z0-9]", "", part[:3]) for part in key.split(":"))
        self.shs.append(default if shorthand is None else shorthand)
        self.in_names.append(in_name)

    def variants(self) -> list[dict[str, Any]]:
        """The arguments of each run; the last parameter varies fastest. Raises UsageError: no parameter."""
        if not self.keys:
            raise UsageError("ExperimentGrid: nothing to run; add a parameter first: add(key, values)")
        found = []
        for combination in itertools.product(*self.vals):
            found.append(variant := dict[str, Any]())
            for key, value in zip(self.keys, combination):
                *outer, last = key.split(":")
                functools.reduce(lambda place, part: place.setdefault(part, {}), outer, variant)[last] = value
        return found

    def variant_name(self, variant: dict[str, Any]) -> str:
        """The name of a variant's experiment: the grid's, then each parameter that varies, except the seed.

        A parameter is named by shorthand and value, as in `hid64-64`; if its values are bools, by shorthand where True.
        """
        name = self._name
        for key, vals, shorthand, in_name in zip(self.keys, self.vals, self.shs, self.in_names):
            if key == "seed" or not (len(vals) > 1 or in_name):
                continue
            value: Any = functools.reduce(operator.getitem, key.split(":"), variant)
            if not all_bools(vals):
                name += f"_{valid_str(shorthand)}{valid_str(value)}"
            elif value:
                name += f"_{valid_str(shorthand)}"
        return name.lstrip("_")

    def print(self) -> None:
        """Prints the parameters, their shorthands and values, and the number of variants."""
        n_variants = len(self.variants())
        n_seeds = len(self.vals[self.keys.index("seed")]) if "seed" in self.keys else 1
        say(f"{'=' * 80}\n{colored(f'ExperimentGrid [{self._name}] runs over parameters:', 'green')}\n\n")
        for key, vals, shorthand in zip(self.keys, self.vals, self.shs):
            values = "".join(f"\t{convert_json(value)}\n" for value in vals)
            say(f" {colored(key.ljust(40), 'cyan')} [{shorthand}]\n\n{values}\n")
        say(f" {'Variants, counting seeds:':<39} {n_variants}\n")
        say(f" {'Variants, not counting seeds:':<39} {n_variants // n_seeds}\n\n{'=' * 80}\n")

    def run(
        self, thunk: Thunk | str, num_cpu: int | str = 1, data_dir: str | os.PathLike[str] | None = None,
        datestamp: bool = False, max_parallel: int = 1, redo: bool = False,
    ) -> list[Result]:  # fmt: skip
        """Runs `thunk` once for each variant, prints a table of the results, and returns them.

        A run that fails prints its report, and the others continue. The same grid, run again, skips runs that have
        succeeded with the same arguments, as finished.json shows them, and functions of the same source (not compared:
        what these call, numbers in large arrays; then use `redo`). With a datestamp all run, in new folders.

        Args:
            thunk: as for `call_experiment`, or the name of the parameter whose values are such functions.
            data_dir: with `datestamp` as for `setup_logger_kwargs`.
            num_cpu: number of ranks of each run; "auto": the cores of this process, divided by `max_parallel`.
            max_parallel: number of runs at once. If it is more than one, each prints to output.txt in its folder.
            redo: also run what has succeeded before.
        Raises UsageError before anything has run: no parameter; two variants with one name; a pickle that fails. Raises
        ExperimentError after all have run: some have failed; a script then ends with status 1. Raises SystemExit, 128 +
        the signal's number, after Ctrl-C, SIGTERM or SIGHUP has stopped all runs.
        """
        whole_number("max_parallel", max_parallel, 1)
        experiments = []
        for variant in self.variants():
            name = self.variant_name(variant)
            if isinstance(thunk, str) and thunk not in variant:
                raise UsageError(f"ExperimentGrid.run: '{thunk}' is not a parameter; they are {', '.join(self.keys)}")
            call = variant.pop(thunk) if isinstance(thunk, str) else thunk
            if not callable(call):
                raise UsageError(f"ExperimentGrid.run: thunk must be a function or name a parameter; got {call!r:.80}")
            name = name or valid_str(call)
            where = setup_logger_kwargs(name, variant.setdefault("seed", 0), data_dir, datestamp)
            experiments.append(Experiment(name, call, num_cpu, where, variant, max_parallel))
        folders = Counter(str(e.folder) for e in experiments)
        if shared := [folder for folder, n in folders.items() if n > 1]:
            raise UsageError(f"{folders[shared[0]]} variants have the folder {shared[0]}; make their names differ")
        self.print()
        return Schedule(experiments, max_parallel, grid=True, redo=redo).run()


def all_bools(vals: Iterable[Any]) -> bool:
    return all(isinstance(v, bool) for v in vals)


def valid_str(v: Any) -> str:
    """A value as part of a file name: functions by name, items joined by "-", anything else in lower case."""
    v = getattr(v, "__name__", v)
    if isinstance(v, (tuple, list)):
        return "-".join(map(valid_str, v))
    return re.sub("[^a-z0-9_-]", "-", str(v).lower())
