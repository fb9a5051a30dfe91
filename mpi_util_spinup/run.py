"""Spinning Up's command line, a process of its own: an algorithm, with every option a parameter of a grid.

    python -m mpi_util_spinup.run ppo --env CartPole-v1 --cpu 4 --exp_name cart
    python -m mpi_util_spinup.run ppo --env CartPole-v1 --lr 1e-3 3e-4 --hid "[32,32]" "[64,64]" --seed 0 10 20
    python -m mpi_util_spinup.run plot data/cart
    python -m mpi_util_spinup.run test_policy data/cart/cart_s0 --trust

An option with several values varies; --key[short] gives its name in the folders. Values are numbers, lists, booleans,
strings; torch.nn.NAME is that class. No value is True. `ppo --help` shows what ppo takes.
"""

import ast
import importlib
import inspect
import re
import sys
from typing import Any

from mpi_util.arrays.adapters import framework
from mpi_util.errors import MpiUtilError

from .run_utils import ExperimentError, ExperimentGrid

ALGORITHMS = ("ppo", "vpg", "trpo")
TOOLS = {"plot": "plot", "test_policy": "play_policy"}  # module of each
SHORT = {"env": "env_name", "lr": "pi_lr", "cpu": "num_cpu", "dt": "datestamp"}
SHORT |= {"hid": "ac_kwargs:hidden_sizes", "act": "ac_kwargs:activation"}
OF_THE_GRID = ("num_cpu", "data_dir", "datestamp", "exp_name")  # one value each


def value(text: str) -> Any:
    """What a word of the command line stands for. Nothing is evaluated."""
    if re.fullmatch(r"torch\.nn\.\w+", text):
        return getattr(importlib.import_module("torch.nn"), text.rpartition(".")[2], text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return text


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    name, *words = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(__doc__)
        return 0
    if name in TOOLS:
        return importlib.import_module(f".{TOOLS[name]}", __package__).main(words) or 0
    try:
        name = name.removesuffix("_pytorch")
        if name not in ALGORITHMS:
            raise ValueError(f"{name!r} is none of: {', '.join(ALGORITHMS)}, plot, test_policy")
        _run(name, words)
    except (ExperimentError, ValueError, MpiUtilError) as error:
        print(f"mpi_util_spinup.run: {error}", file=sys.stderr)
        return 1 if isinstance(error, ExperimentError) else 2
    return 0


def _run(name: str, words: list[str]) -> None:
    framework("torch")  # which the algorithms import
    algorithm = getattr(importlib.import_module(".algorithms", __package__), name)
    signature = inspect.signature(algorithm)
    if {"-h", "--help", "help"} & set(words):
        print(f"{name}{signature}\n\n{algorithm.__doc__}")
        return
    options, shorthands = _parsed(words)
    of_grid = {key: options.pop(key) or [True] * (key == "datestamp") for key in OF_THE_GRID if key in options}
    for key, values in of_grid.items():
        if len(values) != 1 or (key == "datestamp" and not isinstance(values[0], bool)):
            raise ValueError(f"--{key} takes one value")
    known = {*signature.parameters, "env_name"} - {"env_fn", "logger_kwargs"}
    for key in options:
        if key.partition(":")[0] not in known:
            raise ValueError(f"{name} has no argument {key}; it has: {', '.join(sorted(known))}")
    if not options.get("env_name"):
        raise ValueError("give an environment: --env CartPole-v1")
    gym = framework("gymnasium")
    for env in options["env_name"]:
        try:
            if ":" not in str(env):  # else a module that registers it
                gym.spec(str(env))
        except gym.error.Error as error:
            raise ValueError(f"--env {env}: {error}") from None
    grid = ExperimentGrid(str(of_grid.pop("exp_name", [f"cmd_{name}_pytorch"])[0]))
    for key, values in options.items():
        grid.add(key, values or [True], shorthands.get(key))
    grid.run(algorithm, **{key: values[0] for key, values in of_grid.items()})


def _parsed(words: list[str]) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """(values, shorthand) of each option. Raises ValueError: an option is given twice, or a value without an option."""
    options: dict[str, list[Any]] = {}
    shorthands: dict[str, str] = {}
    key = ""
    for word in words:
        if not re.match(r"-+[a-zA-Z_]", word) or word[1:].lower() in ("inf", "nan"):  # which are numbers
            if not key:
                raise ValueError(f"{word!r} is no option")
            options[key].append(word if key in ("exp_name", "data_dir") else value(word))
            continue
        option, equals, first = word.partition("=")
        name, bracket, shorthand = option.lstrip("-").partition("[")
        key = SHORT.get(name, name)
        if key in options:
            raise ValueError(f"{option} is given twice; give its values together: {option} A B")
        options[key] = [first if key in ("exp_name", "data_dir") else value(first)] if equals else []
        if bracket:
            shorthands[key] = shorthand.rstrip("]")
    return options, shorthands


if __name__ == "__main__":
    sys.exit(main())
