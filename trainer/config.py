"""The settings of a training run: one frozen dataclass, which makes the command line and most of config.json."""

import argparse
import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from policies.actor import INIT_LOG_STD
from policies.hyper import DEFAULTS, Hyper
from policies.minibatches import TooFewRows


def _opt(group: str, help: str, default: Any = None, kind: type = str, flags: tuple[str, ...] = (), **more: Any) -> Any:
    """A field and its option on the command line."""
    return field(default=default, metadata={"group": group, "help": help, "kind": kind, "flags": flags, **more})


RUN, BATCH, ALGO, NETS = "the run", "the batch", "the algorithm", "the networks"


@dataclass(frozen=True)
class Config:
    """Settings of one run. None: no limit, or the algorithm's default."""

    env: str = _opt(RUN, "Gymnasium id, such as Humanoid-v4 or module:Env-v0")
    env_kwargs: str = _opt(RUN, "keyword arguments of the environment, a JSON object", "{}")
    nprocs: int = _opt(RUN, "number of processes, 1 or more; the result does not depend on it", 1, int)
    seed: int = _opt(RUN, "random seed, 0 or more", 0, int)
    num_episodes: int | None = _opt(RUN, "stop after N episodes", None, int, ("-n",))
    total_steps: int | None = _opt(RUN, "stop after N environment steps", None, int)
    run_dir: str | None = _opt(RUN, "folder for the results, without a run yet (default: runs/ENV/TIME-sSEED)")
    max_restarts: int = _opt(RUN, "after a crash, start again from the last checkpoint, at most N times", 0, int)
    resume: str | None = _opt(RUN, "folder of an earlier run to continue with its settings", metavar="RUN_DIR")
    eval_every: int | None = _opt(RUN, "evaluate the policy deterministically every N steps", None, int)
    eval_episodes: int = _opt(RUN, "episodes per evaluation, all processes together", 10, int)
    threads: int = _opt(
        RUN, "threads of the update, all processes together; results depend on it, whatever the number of cores", 2, int
    )
    on_env_error: str = _opt(
        RUN, "an environment raises: abort, or restart: run the episode again in a new one, 3 times at most", "abort",
        choices=("abort", "restart"),
    )  # fmt: skip
    save_every: float = _opt(
        RUN, "seconds between checkpoints; 0: after every iteration", 30.0, float, metavar="SECONDS"
    )
    keep: int = _opt(RUN, "number of checkpoints to keep, 1 or more: the last one, and those before it", 2, int)
    device: str = _opt(RUN, "device of the updates, such as cuda", "cpu")
    watchdog: float | None = _opt(
        RUN, "report who is missing when a process has waited so long; 0: never (default: 300)", None, float,
        metavar="SECONDS",
    )  # fmt: skip
    watchdog_kill: bool = _opt(RUN, "end the run at the first such report", False, bool)
    render: bool = _opt(RUN, "show the environment of rank 0 in a window", False, bool)

    batch_size: int = _opt(BATCH, "whole episodes per iteration, all processes together", 20, int, ("-b",))
    batch_steps: int | None = _opt(
        BATCH, "steps per iteration, in segments of fixed length instead of whole episodes", None, int
    )
    num_envs: int = _opt(BATCH, "environments to collect segments from; divides --batch_steps", 20, int)

    parallel: str = _opt(
        BATCH, "gather: rank 0 updates on all rows; average: every process on its own rows, with summed gradients",
        "gather", choices=("gather", "average"),
    )  # fmt: skip
    framework: str = _opt(ALGO, "deep learning framework of the updates", "torch", choices=("torch", "tf"))
    algo: str = _opt(ALGO, f"update rule: {' or '.join(DEFAULTS)}", "ppo", choices=tuple(DEFAULTS))
    gamma: float = _opt(ALGO, "discount per step, 0 to 1", 0.99, float, ("-g",))
    lam: float = _opt(ALGO, "lambda of the generalised advantage estimate, 0 to 1", 0.95, float, ("-l",))
    kl_targ: float | None = _opt(
        ALGO, "KL divergence per update, nats: trpo's bound, ppo-kl's target, ppo stops beyond it (0: never)", None,
        float, ("-k",),
    )  # fmt: skip
    lr: float | None = _opt(ALGO, "learning rate of the policy, above 0; trpo has none", None, float)
    vf_lr: float | None = _opt(ALGO, "learning rate of the value function, above 0", None, float)
    lr_schedule: str = _opt(
        ALGO, "learning rates over the run: constant, or linear (to 0 at --total_steps)", "constant",
        choices=("constant", "linear"),
    )  # fmt: skip
    rew_scale: str = _opt(
        ALGO, "scale of the rewards: 1 - gamma, or 1 / running standard deviation of the returns",
        "gamma", choices=("gamma", "returns"),
    )  # fmt: skip
    epochs: int | None = _opt(ALGO, "most passes of the policy over the batch", None, int)
    vf_epochs: int | None = _opt(ALGO, "passes of the value function over the batch", None, int)
    minibatches: int | None = _opt(ALGO, "minibatches per pass; 0: as --minibatch_rows says", None, int)
    minibatch_rows: int | None = _opt(ALGO, "approximate rows of a minibatch, if --minibatches is 0", None, int)
    clip: float | None = _opt(ALGO, "ppo's probability ratio is clipped to 1 +- X, above 0", None, float)
    ent_coef: float | None = _opt(ALGO, "weight of the entropy in the policy's loss, 0 or more", None, float)
    max_grad_norm: float | None = _opt(ALGO, "gradients are clipped to this norm, above 0", None, float)
    cg_iters: int | None = _opt(ALGO, "most iterations of trpo's conjugate gradients", None, int)
    cg_damping: float | None = _opt(ALGO, "added to the diagonal of trpo's Fisher matrix, 0 or more", None, float)

    policy_hid_list: str = _opt(NETS, "widths of the policy's hidden layers, or auto (Coady's rule)", "64,64")
    valfunc_hid_list: str = _opt(NETS, "the same for the value function", "64,64")

    log_std: float = _opt(
        NETS, "initial log standard deviation of the actions; 0: half an action's range", INIT_LOG_STD, float
    )

    @property
    def unused(self) -> dict[str, str]:
        """Settings without effect: {name: because of which other setting}."""
        segments, algo = self.batch_steps is not None, self.algo
        because = {
            "without --batch_steps": ("num_envs",) * (not segments),
            "with --batch_steps": ("batch_size",) * segments,
            "without --eval_every": ("eval_episodes",) * (self.eval_every is None),
            "with --watchdog 0": ("watchdog_kill",) * (self.watchdog == 0),
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
        values = asdict(self) | {name: getattr(self.hyper, name) for name in self._hyper_names}
        return values | dict.fromkeys(self.unused) | {"resume": None}

    def again(self, saved: dict[str, Any] | None) -> "Config":
        """The settings of this start, where `saved` is what an earlier one that crashed has given to mpi_util.saved."""
        if not saved:
            return self
        has_checkpoint = any(Path(saved["run_dir"]).glob("checkpoint*.safetensors"))
        return replace(self, **{"resume" if has_checkpoint else "run_dir": saved["run_dir"]})

    def check(self) -> "Config":
        """Returns itself if every setting is in its range.

        Raises:
            ValueError: one line that names the option, its value, and what is allowed.
        """
        at_least = {"nprocs": 1, "seed": 0, "batch_size": 1, "num_envs": 1, "epochs": 1, "minibatches": 0, "kl_targ": 0}
        at_least |= {"num_episodes": 1, "total_steps": 1, "batch_steps": 1, "eval_every": 1, "eval_episodes": 1}
        at_least |= {"minibatch_rows": 1, "vf_epochs": 1, "ent_coef": 0, "cg_iters": 1, "cg_damping": 0, "threads": 1}
        at_least |= {"save_every": 0, "keep": 1, "max_restarts": 0, "watchdog": 0}
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"--{name} is {value}; it must be {least} or more")
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; it must be between 0 and 1")
        if not -10 <= self.log_std <= 10:
            raise ValueError(f"--log_std is {self.log_std}; it must be between -10 and 10")
        for name in ("lr", "vf_lr", "clip", "max_grad_norm") + ("kl_targ",) * (self.algo == "trpo"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"--{name} is {value}; it must be above 0")
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
        self._check_minibatches()
        self.env_arguments  # noqa: B018  parsed here, so that bad JSON is found here
        return self

    def _check_minibatches(self) -> None:
        """Raises TooFewRows if the settings alone show that minibatches are too small to be shared."""
        hyper = self.hyper
        known = self.batch_steps // hyper.minibatches if self.batch_steps and hyper.minibatches else None
        rows = hyper.minibatch_rows if not hyper.minibatches else known
        if self.parallel == "average" and rows is not None and rows < self.nprocs:
            raise TooFewRows(
                f"--parallel average with --nprocs {self.nprocs}: a minibatch of {rows} rows has fewer than one for "
                "each process; set --minibatches lower, or --minibatch_rows higher"
            )

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
        return Hyper(**{name: getattr(self, name) for name in self._hyper_names}).resolve()

    @property
    def _hyper_names(self) -> set[str]:
        return {option.name for option in fields(Hyper)} & {option.name for option in fields(Config)}


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
    groups = {name: parser.add_argument_group(name) for name in (RUN, BATCH, ALGO, NETS)}
    for option in fields(Config):
        how, group = option.metadata, groups[option.metadata["group"]]
        if option.name == "env":
            group.add_argument("env", nargs="?", metavar="ENV", help=how["help"], default=argparse.SUPPRESS)
            continue
        shown = "" if option.default is None or option.default is False else f" (default: {option.default})"
        keywords = {"help": how["help"].replace("%", "%%") + shown, "default": argparse.SUPPRESS}
        if how["kind"] is bool:
            keywords["action"] = "store_true"
        else:
            metavar = how.get("metavar", {int: "N", float: "X"}.get(how["kind"], "TEXT"))
            keywords |= {"type": how["kind"], "metavar": metavar}
            if "choices" in how:
                keywords |= {"choices": how["choices"], "metavar": "|".join(how["choices"])}
        group.add_argument(*how["flags"], f"--{option.name}", **keywords)
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
    may_change = {"nprocs", "max_restarts", "num_episodes", "total_steps", "device", "render", "framework"}
    may_change |= {"on_env_error", "save_every", "keep", "watchdog", "watchdog_kill"}
    refused = sorted(set(given) - may_change - {"resume", "env"})
    if refused:
        raise ValueError(f"--{refused[0]} cannot change on --resume; these can: --{', --'.join(sorted(may_change))}")
    path = Path(given["resume"]) / "config.json"
    try:
        saved = json.loads(path.read_text())
        names = {option.name for option in fields(Config)}  # the file also holds versions and command lines
        saved = {name: value for name, value in saved.items() if name in names and value is not None}
        if "total_steps" in given and saved.get("lr_schedule", "constant") != "constant":
            raise ValueError("--total_steps cannot change on --resume: the run's --lr_schedule ends there")
        return replace(Config(**saved), **{key: value for key, value in given.items() if key != "env"})
    except OSError as error:
        raise ValueError(f"cannot resume: {path}: {error.strerror}") from None
    except (TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot resume: {path} is not a run's config.json: {error}") from None
