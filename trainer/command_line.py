"""The command line of train.py: its words become a Config, with the settings of a preset, a file or an earlier run."""

import argparse
import contextlib
import difflib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import mpi_util
from mpi_util_spinup.files import read
from policies.hyper import ALGO, DEFAULTS, RUN
from trainer.config import BATCH, FREE, NETS, Config, kind_of
from trainer.run_folder import require_trust

with contextlib.suppress(ImportError):  # before Python 3.11
    import tomllib

ELSEWHERE = {  # settings by the names that they have in other programs
    "nprocs": "num_workers n_workers workers num_cpu cpu n_cpu", "num_envs": "n_envs envs num_env", "lam": "gae_lambda",
    "total_steps": "total_timesteps timesteps max_steps", "num_episodes": "episodes n_episodes", "lr": "learning_rate",
    "batch_steps": "n_steps num_steps rollout_length steps_per_epoch horizon", "minibatch_rows": "minibatch_size",
    "clip": "clip_range clip_coef clip_ratio", "kl_targ": "target_kl", "epochs": "n_epochs update_epochs",
    "policy_hid_list": "hidden hid hidden_sizes net_arch", "env": "env_id env_name", "name": "exp_name",
}  # fmt: skip
# For Atari's games the settings of Schulman et al. 2017 (arXiv:1707.06347), with one learning rate throughout.
PRESETS: dict[str, dict[str, Any]] = {
    "atari": {
        "algo": "ppo", "total_steps": 10_000_000, "batch_steps": 1024, "num_envs": 8, "env_wrappers": "atari",
        "network": "cnn", "minibatches": 4, "epochs": 4, "vf_epochs": 4, "clip": 0.1, "ent_coef": 0.01, "kl_targ": 0,
        "lr": 2.5e-4, "vf_lr": 2.5e-4, "lr_schedule": "constant", "gamma": 0.99, "lam": 0.95,
    },
}  # fmt: skip
INSTEAD = {  # options that replace others, of a preset or a file
    "batch_size": ("batch_steps", "num_envs"), "batch_steps": ("batch_size",), "minibatch_rows": ("minibatches",),
    "minibatches": ("minibatch_rows",), "name": ("run_dir",), "run_dir": ("name",),
    "env": ("env_command",), "env_command": ("env", "env_kwargs"),
}  # fmt: skip
NO_SETTINGS = {"versions", "commands", "vf_replay"}  # what config.json has besides settings, or had in older versions
OLDER = {"std_fall": 0.0}  # settings of runs that are older than these
AUTO = "auto"  # --nprocs: as many as cores, or as the hosts have places
PLACE = {"name", "run_dir", "resume", "hosts", "hostfile", "log_dir"}  # settings that say where a run was
MODULES = ("env", "env_command", "env_wrappers", "network", "hook")  # settings that may name some


def parse(arguments: list[str] | None = None) -> Config:
    """The Config of a command line. Usage errors end the program with status 2 and one line."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train a policy on N processes: all collect, rank 0 updates; N changes the time, not the result.",
        epilog="example: python train.py Humanoid-v4 --nprocs 10",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
        allow_abbrev=False, argument_default=argparse.SUPPRESS,
    )  # fmt: skip

    source = ""  # of the words, where they are not the user's own

    def refuse(message: str) -> NoReturn:
        _, is_unknown, words = message.partition("unrecognized arguments: ")
        known = {f"--{w}": o.name for o in fields(Config) for w in (o.name, *ELSEWHERE.get(o.name, "").split())}
        word = words.partition(" ")[0].partition("=")[0]
        near = difflib.get_close_matches(word, known, 1) if is_unknown else []
        asks = f"; did you mean --{known[near[0]]}?" if near and f"--{known[near[0]]}" != word else ""
        parser.exit(2, f"train.py: {source}{message}{asks} (see --help)\n")

    parser.error = refuse  # type: ignore[method-assign]
    groups = {name: parser.add_argument_group(name) for name in (RUN, FREE, BATCH, ALGO, NETS)}
    groups[RUN].add_argument("env", nargs="?", metavar="ENV", help=Config.__dataclass_fields__["env"].metadata["help"])
    for option in fields(Config):
        if option.metadata and option.name != "env":
            group, short = option.metadata["group"], option.metadata["short"]
            groups[group].add_argument(*filter(None, [short]), f"--{option.name}", **_keywords(option))
    parser.add_argument("--version", action="version", version=f"mpi_util {mpi_util.__version__}")
    other = parser.add_argument_group("instead, or besides")
    other.add_argument("--watch", metavar="RUN_DIR", help="play what a run has learned; --watch RUN_DIR --help")
    other.add_argument("--seeds", metavar="0-4", help="a run of each seed, in turn, named by --name, or else by --algo")
    other.add_argument("--trust", action="store_true", help="import the modules that the settings of RUN_DIR name")
    other.add_argument("--config", metavar="FILE", help="settings, TOML or JSON, as a run's config.json; options win")
    other.add_argument("--preset", metavar="NAME", choices=PRESETS, help="atari: the settings for its games")
    try:
        words = plain(sys.argv[1:] if arguments is None else arguments)
        given = own = vars(parser.parse_args(words))
        asked = {*own}
        for name, settings_of in (("config", _of_file), ("preset", _of_preset)):  # a file may name a preset
            if name in given:
                if "resume" in own:
                    raise ValueError(f"--{name} cannot change on --resume; leave it out")
                settings, source = settings_of(given), f"{given[name]}: "
                words = [*_as_words(settings, given), *words]
                given, source = vars(parser.parse_args(words)), ""
                asked.update(() if "commands" in settings else given)  # a run's has all settings
        trust, path, *_ = (given.pop(name, None) for name in ("trust", "config", "watch", "seeds", "preset"))
        named = {name: given[name] for name in MODULES if name in given and name not in own}
        if {"env", "env_command"} <= own.keys():
            raise ValueError(f"--env_command starts the environment; leave out {own['env']}")
        if "env_command" in given:  # the module:function in it names the run
            words = given["env_command"].split() or [""]
            given.setdefault("env", next((word for word in words if word.partition(":")[2]), words[-1]))
        if ("env" in given) == ("resume" in given):
            raise ValueError("give either an environment, such as Humanoid-v4, or --resume RUN_DIR")
        if {"name", "run_dir"} <= given.keys():
            raise ValueError("--name and --run_dir both name the folder of the run; give one of them")
        if auto := given.get("nprocs") == AUTO:
            del given["nprocs"]
        n = 0 if "nprocs" in given else mpi_util.nslots(given.get("hosts"), given.get("hostfile"))
        config = _resumed(given, trust) if "resume" in given else Config.of(**given)
        if n := n or mpi_util.usable_cores() * auto:
            k = config.ranks_per_env or 1
            most = (config.num_envs + config.overlap) * k if config.batch_steps else n  # for more there is no work
            config = replace(config, nprocs=max(k, min(n, most) // k * k))
        config.check()
        if path and Config(**{"env": "", **named}).modules:
            require_trust(config, Path(path), trust)
        if config.framework == "auto":
            on_cpu = config.device == "cpu" and not config.network
            config = replace(config, framework="numpy" if on_cpu else "torch")
        for name in sorted(set(config.unused) & asked):
            raise ValueError(f"--{name} has no effect {config.unused[name]}; leave it out")
        return config
    except (ValueError, TypeError, mpi_util.LaunchError) as error:
        parser.error(str(error))


def _keywords(option: Field[Any]) -> dict[str, Any]:
    """Of argparse's add_argument, for a setting."""
    kind, how = kind_of(option), option.metadata
    own = [f"{algo}: {own[option.name]}" for algo, own in DEFAULTS.items() if own.get(option.name) is not None]
    others = [algo for algo in DEFAULTS if option.name not in {*DEFAULTS[algo], *Config.of(algo, eval_every=1).unused}]
    is_none = option.default in (None, "") or option.default is False or not others
    default = "" if is_none else f"default: {option.default}"
    notes = "; ".join(filter(None, [how["must_be"], default, *own]))
    found = {"help": how["help"].replace("%", "%%") + f" ({notes})" * bool(notes)}
    if kind is bool:
        return found | {"action": "store_true"}
    if "choices" in how:
        return found | {"choices": how["choices"], "metavar": "|".join(how["choices"])}
    metavar = how.get("metavar", {int: "N", float: "X"}.get(kind, "TEXT"))
    auto = {AUTO: AUTO} if option.name == "nprocs" else {}
    return found | {"type": (lambda text: auto.get(text) or _whole(text)) if kind is int else kind, "metavar": metavar}


def _whole(text: str) -> int:
    """A whole number, as 1000000, 1_000_000 or 1e6."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        if (number := float(text)).is_integer():
            return int(number)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")


def _resumed(given: dict[str, Any], trust: Any) -> Config:
    """The settings of an earlier run, with those that may change on resume. ValueError, one line: it cannot resume."""
    may_change = {option.name for option in fields(Config) if option.metadata.get("group") == FREE}
    if refused := sorted(set(given) - may_change - {"resume", "env"}):
        raise ValueError(f"--{refused[0]} cannot change on --resume; these can: --{', --'.join(sorted(may_change))}")
    path = Path(given["resume"]) / "config.json"
    saved = _read(path)
    require_trust(saved, path, trust)
    here = {"hosts": None, "hostfile": None, "log_dir": None}  # where it ran then is nothing of the run
    return replace(saved, **here | {key: value for key, value in given.items() if key != "env"})


def _read(path: Path) -> Config:
    """The settings of a run's config.json. Raises ValueError: one line that says what in it cannot be used."""
    options = {option.name: option for option in fields(Config)}
    try:
        saved = json.loads(read(path).decode())
        if not isinstance(saved, dict):
            raise ValueError("it is not a JSON object of settings")
        if unknown := sorted(saved.keys() - options - NO_SETTINGS):
            raise ValueError(f"{unknown[0]} is no setting of this version of train.py; correct or remove it")
        if not isinstance(saved.get("commands", []), list):
            raise ValueError("commands must be a list of strings")
        defaults = {name: option.default for name, option in options.items()} | DEFAULTS.get(str(saved.get("algo")), {})
        config = Config(**{name: saved.get(name, default) for name, default in (defaults | OLDER).items()})
        unset: dict[str, Any] = {name: defaults[name] for name in config.unused if getattr(config, name) is None}
        return replace(config, **unset).check()
    except OSError as error:
        raise ValueError(f"cannot resume: {path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"cannot resume: {path} is not JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"cannot resume: {path}: {str(error).removeprefix('--')}") from None


def plain(arguments: list[str]) -> list[str]:
    """Options as they are defined: --total-steps is --total_steps."""
    return [re.sub("^--[^=]*", lambda option: f"--{option[0][2:].replace('-', '_')}", word) for word in arguments]


def _of_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that --preset stands for. Args: given: options. ValueError, one line: it is for another --algo."""
    if given.get("algo", "ppo") != "ppo":
        raise ValueError(f"--preset {given['preset']} is for --algo ppo")
    return PRESETS[given["preset"]]


def _of_file(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in --config; those of a run's config.json without what is its place. ValueError: it has none."""
    path = given["config"]
    try:
        content = Path(path).read_bytes().decode()
        found = (tomllib if path.endswith(".toml") else json).loads(content)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    except NameError:
        raise ValueError(f"--config {path}: TOML needs Python 3.11; JSON does not") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--config {path} is neither TOML (as FILE.toml) nor JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--config {path}: it is not an object of settings by name")
    if alone := found.keys() & {"seeds", "watch"}:
        raise ValueError(f"--config {path}: give --{min(alone)} on the command line")
    none = {"std_fall": None} if found.get("log_std", 0) is None else {}  # discrete actions, of whatever version
    return OLDER | {name: found[name] for name in found if name not in PLACE} | none if "commands" in found else found


def _as_words(settings: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Settings as words of a command line, without those that options beside them replace. Args: given: options."""
    options, words = {option.name: option for option in fields(Config) if option.metadata}, list[str]()
    without = NO_SETTINGS | {option.name for option in fields(Config)} - options.keys() | given.keys()
    without |= {name for option in given for name in INSTEAD.get(option, ())}
    for name, value in settings.items():
        is_bool = name in options and kind_of(options[name]) is bool
        if name in without or (value is None and name in options) or (value is False and is_bool):
            continue
        text = ",".join(map(str, value)) if isinstance(value, list) else value
        text = json.dumps(value) if isinstance(value, dict) else text
        words += [f"{text}"] if name == "env" else [f"--{name}"] if value is True and is_bool else [f"--{name}={text}"]
    return words
