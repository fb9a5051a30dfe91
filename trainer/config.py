"""The settings of a training run: one frozen dataclass, which makes the command line and most of config.json.

The learners' own settings, their meaning and their defaults are in `policies.hyper`.
"""

import argparse
import contextlib
import difflib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import Field, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn, get_args

import mpi_util
from mpi_util_spinup.files import read
from policies.actor import CNN, INIT_LOG_STD, Spec, parse_hid_list
from policies.hyper import ALGO, DEFAULTS, RUN, Hyper, setting
from trainer.presets import plain, preset
from trainer.run_folder import checkpoints, require_trust

ALLOWED: dict[str, Callable[[float], bool]] = {  # ranges of settings
    "0 or more": lambda x: x >= 0,
    "1 or more": lambda x: x >= 1,
    "above 0": lambda x: x > 0,
    "between 0 and 1": lambda x: 0 <= x <= 1,
    "between -10 and 10": lambda x: -10 <= x <= 10,
}
KINDS = {int: "a whole number", float: "a finite number", str: "a string", bool: "true or false"}


def _kind(option: Field[Any]) -> Any:
    """The option's type, without the None that some accept too."""
    return (get_args(option.type) or [option.type])[0]


# what mpi_fork is given
LAUNCH = ("threads", "max_restarts", "hosts", "hostfile", "tag_output", "log_dir", "ranks_per_env")
ELSEWHERE = {  # settings by the names that they have in other programs
    "nprocs": "num_workers n_workers workers num_cpu cpu n_cpu", "num_envs": "n_envs envs num_env", "lam": "gae_lambda",
    "total_steps": "total_timesteps timesteps max_steps", "num_episodes": "episodes n_episodes", "lr": "learning_rate",
    "batch_steps": "n_steps num_steps rollout_length steps_per_epoch horizon", "minibatch_rows": "minibatch_size",
    "clip": "clip_range clip_coef clip_ratio", "kl_targ": "target_kl", "epochs": "n_epochs update_epochs",
    "policy_hid_list": "hidden hid hidden_sizes net_arch", "env": "env_id env_name", "name": "exp_name",
}  # fmt: skip
ATARI, FREE, BATCH, NETS = "atari", "the run: these may change on --resume", "the batch", "the networks"


@dataclass(frozen=True)
class Config(Hyper):
    """Settings of one run, with those of its learners. None: no limit."""

    env: str = setting(RUN, "Gymnasium id, such as Humanoid-v4 or module:Env-v0")
    ranks_per_env: int | None = setting(RUN, "processes of each environment, which ENV, module:function, makes")
    env_command: str | None = setting(
        RUN, "starts an environment, in place of ENV: mpiexec -n 4 python -m mpi_util.serve module:function",
        metavar="COMMAND",
    )  # fmt: skip
    env_kwargs: str = setting(RUN, "keyword arguments of the environment, a JSON object", "{}")
    env_wrappers: str = setting(
        RUN, "MODULE:FUNCTION,...: each takes the environment and returns another; atari: the usual ones of its games",
        "", metavar="LIST",
    )  # fmt: skip
    fresh_env: bool = setting(RUN, "make a new environment for each episode, if one keeps something over reset", False)
    run_dir: str | None = setting(RUN, "folder for the results, without a run yet (default: runs/ENV/TIME-sSEED)")
    name: str | None = setting(RUN, "of the run: its folder is runs/ENV/NAME-sSEED")
    resume: str | None = setting(RUN, "folder of an earlier run to continue with its settings", metavar="RUN_DIR")
    eval_every: int | None = setting(RUN, "evaluate the policy deterministically every N steps")
    eval_episodes: int = setting(RUN, "episodes per evaluation, all processes together", 10)
    threads: int = setting(
        RUN, "threads of the update, all processes together; results depend on it, not on the cores", 2
    )

    nprocs: int = setting(FREE, "number of processes; the result does not depend on it (but: --parallel)", 1)
    hosts: str | None = setting(FREE, "hosts that ssh reaches, as h1:4,h2:4: 4 processes on each", metavar="LIST")
    hostfile: str | None = setting(FREE, "the same as a file, a line for each host", metavar="FILE")
    tag_output: bool = setting(FREE, "begin each line with its process, as [0] or [0@h1]", False)
    log_dir: str | None = setting(FREE, "folder for a file of each process with what it prints", metavar="DIR")
    eval_async: bool = setting(
        FREE, "evaluate in a further process, beside training, which continues; TestIteration says which policy", False
    )
    num_episodes: int | None = setting(FREE, "stop after N episodes", short="-n")
    total_steps: int | None = setting(FREE, "stop after N environment steps")
    framework: str = setting(
        FREE, "what computes the updates; auto: numpy on the CPU, else torch", choices=("auto", "numpy", "torch", "tf")
    )
    device: str = setting(FREE, "device of the updates, such as cuda", "cpu")
    max_restarts: int = setting(FREE, "restarts from the last checkpoint after a crash, at most", 0, "0 or more")
    on_env_error: str = setting(
        FREE, "an environment raises: abort, or restart: run the episode again in a new one, 3 times at most",
        choices=("abort", "restart"),
    )  # fmt: skip
    env_timeout: float | None = setting(
        FREE, "of --ranks_per_env and --env_command: longest step or reset", must_be="above 0", metavar="SECONDS"
    )  # fmt: skip
    save_every: float = setting(FREE, "seconds between checkpoints; 0: after every iteration", 30.0, metavar="SECONDS")
    keep: int = setting(FREE, "number of checkpoints to keep: the last one, and those before it", 2)
    watchdog: float | None = setting(
        FREE, "report who is missing when a process has waited so long; 0: never, default: 300", metavar="SECONDS"
    )
    watchdog_kill: bool = setting(FREE, "end the run at the first such report", False)
    video_every: int | None = setting(FREE, "record an episode every N steps, into videos/ of the run's folder")
    tensorboard: bool = setting(FREE, "write TensorBoard's event files too (pip install tensorboardX)", False)
    wandb: bool = setting(FREE, "log to Weights & Biases too (pip install wandb)", False)
    render: bool = setting(FREE, "show the environment of rank 0 in a window", False)

    batch_size: int = setting(
        BATCH, "whole episodes per iteration, of all processes, instead of --batch_steps", 20, short="-b"
    )
    batch_steps: int | None = setting(BATCH, "steps per iteration, in segments of fixed length, instead of -b")
    num_envs: int = setting(BATCH, "environments to collect segments from; divides --batch_steps", 20)
    parallel: str = setting(
        BATCH, "gather: rank 0 updates on all rows; average: every process on its own rows, with summed gradients",
        choices=("gather", "average"),
    )  # fmt: skip
    overlap: bool = setting(
        BATCH, "collect while rank 0 updates, with the weights from before that update: a lag of one update", False
    )

    gamma: float = setting(ALGO, "discount per step", 0.99, "between 0 and 1", "-g")
    lam: float | None = setting(
        ALGO, "lambda of the generalised advantage estimate; ppo: 0.95, and down to 0.8 for actions of more than 4 "
        "components", 0.95, "between 0 and 1", "-l",
    )  # fmt: skip
    lr_schedule: str = setting(
        ALGO, "learning rates over the run: linear (to 0 at --total_steps, where it is given), or constant",
        choices=("linear", "constant"),
    )  # fmt: skip
    rew_scale: str = setting(
        ALGO, "scale of the rewards: 1 - gamma, or 1 / running standard deviation of the returns",
        choices=("gamma", "returns"),
    )  # fmt: skip

    policy_hid_list: str = setting(NETS, "widths of the policy's hidden layers, or auto (Coady's rule)", "64,64")
    valfunc_hid_list: str = setting(NETS, "the same for the value function", "64,64")
    network: str = setting(
        NETS, "cnn: for images; MODULE:FUNCTION makes any others; in torch, which every process then loads", "",
        metavar="NAME",
    )  # fmt: skip
    log_std: float = setting(
        NETS, "initial log standard deviation of the actions; 0: half an action's range", INIT_LOG_STD,
        "between -10 and 10",
    )  # fmt: skip

    @classmethod
    def of(cls, algo: str = "ppo", **given: Any) -> "Config":
        """As Hyper.of; `batch_size` stands for whole episodes where segments are the algorithm's default."""
        own = super().of(algo, **given)
        return replace(own, batch_steps=None) if given.get("batch_size") and "batch_steps" not in given else own

    @property
    def unused(self) -> dict[str, str]:
        """Settings without effect: {name: because of which other setting}."""
        algo, of_trpo = self.algo, ("cg_iters", "cg_damping")
        of_algo = {"ppo": of_trpo, "ppo-kl": ("clip", *of_trpo), "trpo": ("clip", "lr", "epochs")}
        because = (
            ("without --batch_steps", self.batch_steps is None, ("num_envs",)),
            ("with --batch_steps", self.batch_steps is not None, ("batch_size",)),
            ("without --eval_every", self.eval_every is None, ("eval_episodes", "eval_async")),
            ("with --watchdog 0", self.watchdog == 0, ("watchdog_kill",)),
            ("without --env_command", not (self.ranks_per_env or self.env_command), ("env_timeout",)),
            ("with --nprocs 1", self.nprocs == 1, ("watchdog_kill", "tag_output", "log_dir")),
            (f"with --minibatches {self.minibatches}", self.minibatches, ("minibatch_rows",)),
            (f"with --network {self.network}", self.network, ("policy_hid_list", "valfunc_hid_list")),
            (f"with --algo {algo}", True, of_algo.get(algo, ("clip", *of_trpo, "kl_targ"))),
        )
        return {name: reason for reason, holds, names in because if holds for name in names}

    @property
    def effective(self) -> dict[str, Any]:
        """Every setting with its value in the run; None: no limit, or no effect."""
        return asdict(self) | dict.fromkeys(self.unused) | {"resume": None}

    def again(self, saved: dict[str, Any] | None) -> "Config":
        """The settings of this start, where `saved` is what an earlier one that crashed has given to mpi_util.saved."""
        if not saved:
            return self
        return replace(self, **{"resume" if checkpoints(Path(saved["run_dir"])) else "run_dir": saved["run_dir"]})

    def check(self) -> "Config":
        """Returns itself. Raises ValueError: one line that names an option, its value, and what is allowed."""
        for option in fields(self):
            value, kind, how = getattr(self, option.name), _kind(option), option.metadata
            if value is None and get_args(option.type):
                continue
            must_be = how.get("must_be") or {int: "1 or more", float: "0 or more"}.get(kind)
            if option.name == "kl_targ" and self.algo == "trpo":
                must_be = "above 0"
            if type(value) not in {float: (float, int)}.get(kind, (kind,)) or value == math.inf:
                must_be = KINDS[kind]
            elif "choices" in how and value not in how["choices"]:
                must_be = " or ".join(how["choices"])
            elif not must_be or ALLOWED[must_be](value):
                continue
            raise ValueError(f"--{option.name} is {'null' if value is None else repr(value)}; it must be {must_be}")
        k, n_envs, steps = self.ranks_per_env or 1, self.num_envs, self.batch_steps or 0
        n = self.nprocs // k  # workers
        collecting = n - (self.overlap and n > 1)
        fits = f"--num_envs {collecting} --batch_steps {-(-steps // collecting) * collecting}"
        for wrong, problem in (
            (self.nprocs % k, f"--nprocs {self.nprocs} is not a multiple of --ranks_per_env {k}"),
            (self.ranks_per_env and self.env_command, "--ranks_per_env and --env_command exclude each other"),
            ("/" in (self.name or ""), f"--name {self.name}: give it without /; --run_dir names any folder"),
            (steps and collecting > n_envs,
             f"--num_envs {n_envs} is too few for --nprocs {n}: each process that collects needs one; such as {fits}"),
            (steps % n_envs, f"--batch_steps {steps} is not a multiple of --num_envs {n_envs}"),
            (self.overlap and self.parallel == "average",
             "--overlap collects while rank 0 updates; with --parallel average every process does"),
            (self.network and self.framework in ("numpy", "tf"),
             f"--network is for --framework torch; {self.framework} has the built-in ones only"),
        ):  # fmt: skip
            if wrong:
                raise ValueError(problem)
        self.env_arguments  # noqa: B018  parsed here, so that bad JSON is found here
        parse_hid_list(self.policy_hid_list, 1, 1, "policy")  # likewise
        parse_hid_list(self.valfunc_hid_list, 1, 1, "value")
        return self

    def fitted(self, spec: Spec) -> "Config":
        """With a lambda for such actions, if none was given.

        The more components an action has, the more noise of theirs a return adds up: a shorter estimate holds less of
        it. With the lambda of a few components Humanoid-v4 does not learn to walk, with that of many Hopper-v4 learns
        to stand (docs/learning.md).
        """
        n = 1 if spec.discrete else spec.act_dim
        return replace(self, lam=1.0 - min(max(n, 4), 16) / 80.0 if self.lam is None else self.lam)

    @property
    def wrappers(self) -> list[str]:
        """Of the environment, the innermost first."""
        return [name.strip() for name in self.env_wrappers.split(",") if name.strip()]

    @property
    def modules(self) -> list[str]:
        """Those that are imported because a setting names them."""
        code = [self.env_command] if self.env_command else [self.env] * (":" in self.env)
        code += [name for name in self.wrappers if name != ATARI]
        code += [self.network] * (self.network not in ("", CNN))
        return [name.partition(":")[0] for name in code]

    @property
    def env_arguments(self) -> dict[str, Any]:
        """The environment's keyword arguments."""
        try:
            arguments = json.loads(self.env_kwargs)
        except json.JSONDecodeError as error:
            raise ValueError(f"--env_kwargs {self.env_kwargs!r} is not JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise ValueError(f"--env_kwargs {self.env_kwargs!r} is not a JSON object, such as '{{\"gravity\": -9.8}}'")
        return arguments

    @property
    def first_rew_scale(self) -> float:
        """Initial factor of the rewards. Coady's: returns then are of the size of one reward."""
        return 1.0 - self.gamma if self.gamma < 0.999 else 1.0


def parse(arguments: list[str] | None = None) -> Config:
    """The Config of a command line. Usage errors end the program with status 2 and one line."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train a policy on N processes: all collect, rank 0 updates; N changes the time, not the result.",
        epilog="example: python train.py Humanoid-v4 --nprocs 10",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
        allow_abbrev=False, argument_default=argparse.SUPPRESS,
    )  # fmt: skip

    def refuse(message: str) -> NoReturn:
        _, is_unknown, words = message.partition("unrecognized arguments: ")
        known = {f"--{w}": o.name for o in fields(Config) for w in (o.name, *ELSEWHERE.get(o.name, "").split())}
        word = words.partition(" ")[0].partition("=")[0]
        near = difflib.get_close_matches(word, known, 1) if is_unknown else []
        asks = f"; did you mean --{known[near[0]]}?" if near and f"--{known[near[0]]}" != word else ""
        parser.exit(2, f"train.py: {message}{asks} (see --help)\n")

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
    other.add_argument(
        "--seeds", metavar="0-4", help="one run after the other, of each seed; NAME: --name, or the --algo"
    )
    other.add_argument("--trust", action="store_true", help="import the modules that the settings of RUN_DIR name")
    other.add_argument("--preset", metavar="NAME", help="atari: the settings for its games")
    try:
        words, auto = plain(sys.argv[1:] if arguments is None else arguments)
        given = vars(parser.parse_args(words))
        if "preset" in given:
            given = vars(parser.parse_args([*preset(given["preset"], given), *words]))
        trust, *_ = (given.pop(name, False) for name in ("trust", "watch", "seeds", "preset"))
        if "env_command" in given:
            given.setdefault("env", given["env_command"].rpartition(" ")[2])
        if ("env" in given) == ("resume" in given):
            raise ValueError("give either an environment, such as Humanoid-v4, or --resume RUN_DIR")
        if {"name", "run_dir"} <= given.keys():
            raise ValueError("--name and --run_dir both name the folder of the run; give one of them")
        slots = 0 if "nprocs" in given else mpi_util.nslots(given.get("hosts"), given.get("hostfile"))
        if n := slots or (mpi_util.usable_cores() if auto else 0):
            k = given.get("ranks_per_env", 1)
            given.setdefault("nprocs", max(k, n - n % k))
        config = (_resumed(given, trust) if "resume" in given else Config.of(**given)).check()
        if config.framework == "auto":
            on_cpu = config.device == "cpu" and not config.network
            config = replace(config, framework="numpy" if on_cpu else "torch")
        for name in sorted(set(config.unused) & set(given)):
            raise ValueError(f"--{name} has no effect {config.unused[name]}; leave it out")
        return config
    except (ValueError, TypeError, mpi_util.LaunchError) as error:
        parser.error(str(error))


def _keywords(option: Field[Any]) -> dict[str, Any]:
    """Of argparse's add_argument, for a setting."""
    kind, how = _kind(option), option.metadata
    own = [f"{algo}: {own[option.name]}" for algo, own in DEFAULTS.items() if own.get(option.name) is not None]
    others = [algo for algo in DEFAULTS if option.name not in {*DEFAULTS[algo], *Config.of(algo).unused}]
    is_none = option.default in (None, "") or option.default is False or not others
    default = "" if is_none else f"default: {option.default}"
    notes = "; ".join(filter(None, [how["must_be"], default, *own]))
    found = {"help": how["help"].replace("%", "%%") + f" ({notes})" * bool(notes)}
    if kind is bool:
        return found | {"action": "store_true"}
    if "choices" in how:
        return found | {"choices": how["choices"], "metavar": "|".join(how["choices"])}
    metavar = how.get("metavar", {int: "N", float: "X"}.get(kind, "TEXT"))
    return found | {"type": _whole if kind is int else kind, "metavar": metavar}


def _whole(text: str) -> int:
    """A whole number, as 1000000, 1_000_000 or 1e6."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        if (number := float(text)).is_integer():
            return int(number)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")


def _resumed(given: dict[str, Any], trust: bool) -> Config:
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
        if unknown := sorted(saved.keys() - options - {"versions", "commands"}):
            raise ValueError(f"{unknown[0]} is no setting of this version of train.py; correct or remove it")
        if not isinstance(saved.get("commands", []), list):
            raise ValueError("commands must be a list of strings")
        defaults = {name: option.default for name, option in options.items()} | DEFAULTS.get(str(saved.get("algo")), {})
        config = Config(**{name: saved.get(name, default) for name, default in defaults.items()})
        unset: dict[str, Any] = {name: defaults[name] for name in config.unused if getattr(config, name) is None}
        return replace(config, **unset).check()
    except OSError as error:
        raise ValueError(f"cannot resume: {path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"cannot resume: {path} is not JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"cannot resume: {path}: {str(error).removeprefix('--')}") from None
