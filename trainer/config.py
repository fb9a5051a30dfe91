"""The settings of a training run: one frozen dataclass, which makes the command line and most of config.json."""

import argparse
import json
from collections.abc import Callable
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from policies.actor import INIT_LOG_STD, parse_hid_list
from policies.hyper import DEFAULTS, Hyper
from policies.minibatches import TooFewRows

ALLOWED: dict[str, Callable[[float], bool]] = {  # ranges of settings
    "0 or more": lambda x: x >= 0,
    "1 or more": lambda x: x >= 1,
    "above 0": lambda x: x > 0,
    "between 0 and 1": lambda x: 0 <= x <= 1,
    "between -10 and 10": lambda x: -10 <= x <= 10,
}


def _opt(group: str, help: str, default: Any = None, must_be: str = "", short: str = "", **more: Any) -> Any:
    """A field and its option on the command line. must_be: one of ALLOWED; "": as usual for its type."""
    return field(default=default, metadata={"group": group, "help": help, "must_be": must_be, "short": short, **more})


KINDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def _kind(option: Field) -> type:
    """The option's type, without the None that some accept too."""
    return (get_args(option.type) or [option.type])[0]


RUN, FREE, BATCH = "the run", "the run: these may change on --resume", "the batch"
ALGO, NETS = "the algorithm", "the networks"


@dataclass(frozen=True)
class Config:
    """Settings of one run. None: no limit, or the algorithm's default."""

    env: str = _opt(RUN, "Gymnasium id, such as Humanoid-v4 or module:Env-v0")
    env_kwargs: str = _opt(RUN, "keyword arguments of the environment, a JSON object", "{}")
    seed: int = _opt(RUN, "random seed", 0, "0 or more")
    run_dir: str | None = _opt(RUN, "folder for the results, without a run yet (default: runs/ENV/TIME-sSEED)")
    resume: str | None = _opt(RUN, "folder of an earlier run to continue with its settings", metavar="RUN_DIR")
    eval_every: int | None = _opt(RUN, "evaluate the policy deterministically every N steps")
    eval_episodes: int = _opt(RUN, "episodes per evaluation, all processes together", 10)
    threads: int = _opt(RUN, "threads of the update, all processes together; results depend on it, not on the cores", 2)

    nprocs: int = _opt(FREE, "number of processes; the result does not depend on it (but: --parallel)", 1)
    num_episodes: int | None = _opt(FREE, "stop after N episodes", short="-n")
    total_steps: int | None = _opt(FREE, "stop after N environment steps")
    framework: str = _opt(FREE, "deep learning framework of the updates", "torch", choices=("torch", "tf"))
    device: str = _opt(FREE, "device of the updates, such as cuda", "cpu")
    max_restarts: int = _opt(FREE, "restarts from the last checkpoint after a crash, at most", 0, "0 or more")
    on_env_error: str = _opt(
        FREE, "an environment raises: abort, or restart: run the episode again in a new one, 3 times at most", "abort",
        choices=("abort", "restart"),
    )  # fmt: skip
    save_every: float = _opt(FREE, "seconds between checkpoints; 0: after every iteration", 30.0, metavar="SECONDS")
    keep: int = _opt(FREE, "number of checkpoints to keep: the last one, and those before it", 2)
    watchdog: float | None = _opt(
        FREE, "report who is missing when a process has waited so long; 0: never, default: 300", metavar="SECONDS"
    )
    watchdog_kill: bool = _opt(FREE, "end the run at the first such report", False)
    render: bool = _opt(FREE, "show the environment of rank 0 in a window", False)

    batch_size: int = _opt(BATCH, "whole episodes per iteration, all processes together", 20, short="-b")
    batch_steps: int | None = _opt(BATCH, "steps per iteration, in segments of fixed length, not whole episodes")
    num_envs: int = _opt(BATCH, "environments to collect segments from; divides --batch_steps", 20)
    parallel: str = _opt(
        BATCH, "gather: rank 0 updates on all rows; average: every process on its own rows, with summed gradients",
        "gather", choices=("gather", "average"),
    )  # fmt: skip

    algo: str = _opt(ALGO, f"update rule: {' or '.join(DEFAULTS)}", "ppo", choices=tuple(DEFAULTS))
    gamma: float = _opt(ALGO, "discount per step", 0.99, "between 0 and 1", "-g")
    lam: float = _opt(ALGO, "lambda of the generalised advantage estimate", 0.95, "between 0 and 1", "-l")
    kl_targ: float | None = _opt(
        ALGO, "KL divergence per update, nats: trpo's bound, ppo-kl's target; ppo stops beyond it, 0: never", short="-k"
    )
    lr: float | None = _opt(ALGO, "learning rate of the policy; trpo has none", None, "above 0")
    vf_lr: float | None = _opt(ALGO, "learning rate of the value function", None, "above 0")
    lr_schedule: str = _opt(
        ALGO, "learning rates over the run: constant, or linear (to 0 at --total_steps)", "constant",
        choices=("constant", "linear"),
    )  # fmt: skip
    rew_scale: str = _opt(
        ALGO, "scale of the rewards: 1 - gamma, or 1 / running standard deviation of the returns",
        "gamma", choices=("gamma", "returns"),
    )  # fmt: skip
    epochs: int | None = _opt(ALGO, "most passes of the policy over the batch")
    vf_epochs: int | None = _opt(ALGO, "passes of the value function over the batch")
    minibatches: int | None = _opt(ALGO, "minibatches per pass; 0: as --minibatch_rows says", None, "0 or more")
    minibatch_rows: int | None = _opt(ALGO, "approximate rows of a minibatch, if --minibatches is 0")
    clip: float | None = _opt(ALGO, "ppo's probability ratio is clipped to 1 +- X", None, "above 0")
    ent_coef: float | None = _opt(ALGO, "weight of the entropy in the policy's loss", None, "0 or more")
    max_grad_norm: float | None = _opt(ALGO, "gradients are clipped to this norm", None, "above 0")
    cg_iters: int | None = _opt(ALGO, "most iterations of trpo's conjugate gradients")
    cg_damping: float | None = _opt(ALGO, "added to the diagonal of trpo's Fisher matrix", None, "0 or more")

    policy_hid_list: str = _opt(NETS, "widths of the policy's hidden layers, or auto (Coady's rule)", "64,64")
    valfunc_hid_list: str = _opt(NETS, "the same for the value function", "64,64")
    log_std: float = _opt(
        NETS, "initial log standard deviation of the actions; 0: half an action's range", INIT_LOG_STD,
        "between -10 and 10",
    )  # fmt: skip

    @property
    def unused(self) -> dict[str, str]:
        """Settings without effect: {name: because of which other setting}."""
        segments, algo = self.batch_steps is not None, self.algo
        because = {
            "without --batch_steps": ("num_envs",) * (not segments),
            "with --batch_steps": ("batch_size",) * segments,
            "without --eval_every": ("eval_episodes",) * (self.eval_every is None),
            "with --watchdog 0": ("watchdog_kill",) * (self.watchdog == 0),
            "with --nprocs 1": ("watchdog_kill",) * (self.nprocs == 1),
            f"with --minibatches {self.minibatches}": ("minibatch_rows",) * bool(self.minibatches),
            f"with --algo {algo}": ("clip",) * (algo != "ppo")
            + ("lr", "epochs") * (algo == "trpo")
            + ("cg_iters", "cg_damping") * (algo != "trpo")
            + ("kl_targ",) * (algo == "vpg"),
        }
        return {name: reason for reason, names in because.items() for name in names}

    @property
    def effective(self) -> dict[str, Any]:
        """Every setting with its value in the run; None: no limit, or no effect."""
        values = asdict(self) | {k: v for k, v in asdict(self.hyper).items() if hasattr(self, k)}
        return values | dict.fromkeys(self.unused) | {"resume": None}

    def again(self, saved: dict[str, Any] | None) -> "Config":
        """The settings of this start, where `saved` is what an earlier one that crashed has given to mpi_util.saved."""
        if not saved:
            return self
        has_checkpoint = any(Path(saved["run_dir"]).glob("checkpoint*.safetensors"))
        return replace(self, **{"resume" if has_checkpoint else "run_dir": saved["run_dir"]})

    def check(self) -> "Config":
        """Returns itself. Raises ValueError: one line that names an option, its value, and what is allowed."""
        for option in fields(self):
            value, kind, how = getattr(self, option.name), _kind(option), option.metadata
            if value is None and get_args(option.type):
                continue
            must_be = how["must_be"] or {int: "1 or more", float: "0 or more"}.get(kind)
            if option.name == "kl_targ" and self.algo == "trpo":
                must_be = "above 0"
            if type(value) not in {float: (float, int)}.get(kind, (kind,)):
                must_be = KINDS[kind]
            elif "choices" in how and value not in how["choices"]:
                must_be = " or ".join(how["choices"])
            elif not must_be or ALLOWED[must_be](value):
                continue
            raise ValueError(f"--{option.name} is {'null' if value is None else repr(value)}; it must be {must_be}")
        if self.lr_schedule == "linear" and self.total_steps is None:
            raise ValueError("--lr_schedule linear needs --total_steps: where the step sizes reach 0")
        if self.batch_steps is not None and self.batch_steps % self.num_envs:
            raise ValueError(
                f"--batch_steps {self.batch_steps} is not a multiple of --num_envs {self.num_envs}; "
                "the segments of all environments have the same length"
            )
        if self.batch_steps is not None and self.nprocs > self.num_envs:
            raise ValueError(
                f"--nprocs {self.nprocs} is more than --num_envs {self.num_envs}; in segment mode each process "
                f"needs an environment: --num_envs {self.nprocs} or more"
            )
        hyper = self.hyper
        known = self.batch_steps // hyper.minibatches if self.batch_steps and hyper.minibatches else None
        rows = hyper.minibatch_rows if not hyper.minibatches else known
        if self.parallel == "average" and rows is not None and rows < self.nprocs:
            raise TooFewRows(rows, self.nprocs)
        self.env_arguments  # noqa: B018  parsed here, so that bad JSON is found here
        parse_hid_list(self.policy_hid_list, 1, 1, "policy")  # likewise
        parse_hid_list(self.valfunc_hid_list, 1, 1, "value")
        return self

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

    @property
    def hyper(self) -> Hyper:
        """The hyperparameters of the learners."""
        return Hyper(**{o.name: getattr(self, o.name) for o in fields(Hyper) if hasattr(self, o.name)}).resolve()


def parse(arguments: list[str] | None = None) -> Config:
    """The Config of a command line. Usage errors end the program with status 2 and one line."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Train a policy on N processes: all collect, rank 0 updates; N changes the time, not the result.",
        epilog="example: python train.py Humanoid-v4 --nprocs 10",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
        allow_abbrev=False,
    )
    parser.error = lambda message: parser.exit(2, f"train.py: {message} (see --help)\n")
    groups = {name: parser.add_argument_group(name) for name in (RUN, FREE, BATCH, ALGO, NETS)}
    for option in fields(Config):
        how, group = option.metadata, groups[option.metadata["group"]]
        if option.name == "env":
            group.add_argument("env", nargs="?", metavar="ENV", help=how["help"], default=argparse.SUPPRESS)
            continue
        kind = _kind(option)
        default = "" if option.default is None or option.default is False else f"default: {option.default}"
        notes = "; ".join(filter(None, [how["must_be"], default]))
        keywords = {"help": how["help"].replace("%", "%%") + f" ({notes})" * bool(notes), "default": argparse.SUPPRESS}
        if kind is bool:
            keywords["action"] = "store_true"
        elif "choices" in how:
            keywords |= {"choices": how["choices"], "metavar": "|".join(how["choices"])}
        else:
            keywords |= {"type": kind, "metavar": how.get("metavar", {int: "N", float: "X"}.get(kind, "TEXT"))}
        group.add_argument(*filter(None, [how["short"]]), f"--{option.name}", **keywords)
    given = vars(parser.parse_args(arguments))
    if ("env" in given) == ("resume" in given):
        parser.error("give either an environment, such as Humanoid-v4, or --resume RUN_DIR")
    try:
        config = (_resumed(given) if "resume" in given else Config(**given)).check()
        for name in sorted(set(config.unused) & set(given)):
            raise ValueError(f"--{name} has no effect {config.unused[name]}; leave it out")
        return config
    except (ValueError, TypeError) as error:
        parser.error(str(error))


def _resumed(given: dict[str, Any]) -> Config:
    """The settings of an earlier run, with those that may change on resume.

    Raises:
        ValueError: one line: there is no such run, or a setting was given that cannot change.
    """
    may_change = {option.name for option in fields(Config) if option.metadata["group"] == FREE}
    refused = sorted(set(given) - may_change - {"resume", "env"})
    if refused:
        raise ValueError(f"--{refused[0]} cannot change on --resume; these can: --{', --'.join(sorted(may_change))}")
    saved = _read(Path(given["resume"]) / "config.json")
    if "total_steps" in given and saved.lr_schedule != "constant":
        raise ValueError("--total_steps cannot change on --resume: the run's --lr_schedule ends there")
    return replace(saved, **{key: value for key, value in given.items() if key != "env"})


def _read(path: Path) -> Config:
    """The settings of a run's config.json. Raises ValueError: one line that says what in it cannot be used."""
    options = {option.name: option for option in fields(Config)}
    try:
        saved = json.loads(path.read_text())
        if not isinstance(saved, dict):
            raise ValueError("it is not a JSON object of settings")
        if unknown := sorted(saved.keys() - options - {"versions", "commands"}):
            raise ValueError(f"{unknown[0]} is no setting of this version of train.py; correct or remove it")
        if not isinstance(saved.get("commands", []), list):
            raise ValueError("commands must be a list of strings")
        config = Config(**{name: saved.get(name, option.default) for name, option in options.items()})
        config = replace(config, **{n: options[n].default for n in config.unused if getattr(config, n) is None})
        return config.check()
    except OSError as error:
        raise ValueError(f"cannot resume: {path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"cannot resume: {path} is not JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"cannot resume: {path}: {str(error).removeprefix('--')}") from None
