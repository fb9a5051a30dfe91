"""The settings of a training run: one frozen dataclass, of which `command_line` and most of config.json are made.

The learners' own settings, their meaning and their defaults are in `policies.hyper`.
"""

import json
import math
from collections.abc import Callable
from dataclasses import Field, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from policies.actor import CNN, INIT_LOG_STD, Spec, parse_hid_list
from policies.hyper import ALGO, RUN, Hyper, setting
from trainer.run_folder import checkpoints

ALLOWED: dict[str, Callable[[float], bool]] = {  # ranges of settings
    "0 or more": lambda x: x >= 0,
    "1 or more": lambda x: x >= 1,
    "above 0": lambda x: x > 0,
    "between 0 and 1": lambda x: 0 <= x <= 1,
    "between 0 and 10": lambda x: 0 <= x <= 10,
    "between -10 and 10": lambda x: -10 <= x <= 10,
}
KINDS = {int: "a whole number", float: "a finite number", str: "a string", bool: "true or false"}


def kind_of(option: Field[Any]) -> Any:
    """The option's type, without the None that some accept too."""
    return (get_args(option.type) or [option.type])[0]


LAUNCH = ("threads", "max_restarts", "hosts", "hostfile", "tag_output", "log_dir", "ranks_per_env")  # for mpi_fork
OF_ENV = ("env", "env_kwargs", "env_wrappers", "env_command", "ranks_per_env")  # what makes an environment again
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
    threads: int = setting(RUN, "threads of the update, all processes together; results depend on it, not on cores", 2)

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
        FREE, "an environment raises: abort, or restart: again in a new one; a third failure in a row ends the run",
        choices=("abort", "restart"),
    )  # fmt: skip
    env_timeout: float | None = setting(
        FREE, "of --ranks_per_env and --env_command: longest call, or start", must_be="above 0", metavar="SECONDS"
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
    hook: str = setting(
        FREE, "MODULE:FUNCTION, given (run, row) each iteration: adds columns, sets lr, ends a run", "", metavar="NAME"
    )
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
    overlap: bool = setting(BATCH, "collect while rank 0 updates, with weights that lag one update", False)

    gamma: float | None = setting(
        ALGO, "discount; ppo: then 0.997, until an episode has 333 steps or fewer", 0.99, "between 0 and 1", "-g"
    )
    lam: float | None = setting(
        ALGO, "lambda of GAE; ppo: 0.95, down to 0.8 for more than 4 action components", 0.95, "between 0 and 1", "-l"
    )
    lr_schedule: str = setting(
        ALGO, "step sizes: linear to 0 at --total_steps, or constant", choices=("linear", "constant")
    )
    rew_scale: str = setting(ALGO, "1 - gamma (1 from 0.999 on), or 1 / returns' std", choices=("gamma", "returns"))

    policy_hid_list: str = setting(NETS, "widths of the policy's hidden layers, or auto (Coady's rule)", "64,64")
    valfunc_hid_list: str = setting(NETS, "the same for the value function", "64,64")
    network: str = setting(
        NETS, "cnn: for images; MODULE:FUNCTION makes others; in torch, which all processes load", "", metavar="NAME"
    )
    log_std: float | None = setting(
        NETS, "initial log standard deviation of the actions; 0: half an action's range; ppo: 0 for one component, "
        "-0.5 for up to 4, else -1", INIT_LOG_STD, "between -10 and 10",
    )  # fmt: skip

    @classmethod
    def of(cls, algo: str = "ppo", **given: Any) -> "Config":
        """As Hyper.of; `batch_size` stands for whole episodes where segments are the algorithm's default."""
        own = super().of(algo, **given)
        return replace(own, batch_steps=None) if given.get("batch_size") and "batch_steps" not in given else own

    @property
    def unused(self) -> dict[str, str]:
        """Settings without effect: {name: because of which other setting}."""
        algo, of_trpo, on_ranks = self.algo, ("cg_iters", "cg_damping"), self.ranks_per_env or self.env_command
        of_algo = {"ppo": of_trpo, "ppo-kl": ("clip", *of_trpo), "trpo": ("clip", "lr", "epochs")}
        because = (
            ("without --batch_steps", self.batch_steps is None, ("num_envs",)),
            ("with --batch_steps", self.batch_steps is not None, ("batch_size",)),
            ("without --eval_every", self.eval_every is None, ("eval_episodes", "eval_async")),
            ("with --watchdog 0", self.watchdog == 0, ("watchdog_kill",)),
            ("without --env_command or --ranks_per_env", not on_ranks, ("env_timeout",)),
            ("with --env_command", self.env_command, ("env_kwargs",)),
            ("with --nprocs 1", self.nprocs == 1, ("watchdog_kill", "tag_output") + ("log_dir",) * (not on_ranks)),
            (f"with --minibatches {self.minibatches}", self.minibatches, ("minibatch_rows",)),
            (f"with --network {self.network}", self.network, ("policy_hid_list", "valfunc_hid_list")),
            (f"with --algo {algo}", True, of_algo.get(algo, ("clip", *of_trpo, "kl_targ"))),
        )
        return {name: reason for reason, holds, names in because if holds for name in names}

    @property
    def effective(self) -> dict[str, Any]:
        """Every setting with its value in the run; None: no limit, no effect, or as the environment wants it."""
        return asdict(self) | dict.fromkeys(self.unused) | {"resume": None}

    def again(self, saved: dict[str, Any] | None) -> "Config":
        """The settings of this start, where `saved` is what an earlier one that crashed has given to mpi_util.saved."""
        if not saved:
            return self
        return replace(self, **{"resume" if checkpoints(Path(saved["run_dir"])) else "run_dir": saved["run_dir"]})

    def check(self) -> "Config":
        """Returns itself. Raises ValueError: one line that names an option, its value, and what is allowed."""
        for option in fields(self):
            value, kind, how = getattr(self, option.name), kind_of(option), option.metadata
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
        n = max(1, self.nprocs // k)  # workers
        collecting = n - (self.overlap and n > 1)
        fits = f"--num_envs {collecting} --batch_steps {-(-steps // collecting) * collecting}"
        for wrong, problem in (
            (self.nprocs % k, f"--nprocs {self.nprocs} is not a multiple of --ranks_per_env {k}"),
            (self.ranks_per_env and self.env_command, "--ranks_per_env and --env_command exclude each other"),
            (self.ranks_per_env and self.eval_async, "--eval_async is one process, no team of --ranks_per_env"),
            ("/" in (self.name or ""), f"--name {self.name}: give it without /; --run_dir names any folder"),
            (steps and collecting > n_envs,
             f"--num_envs {n_envs} is too few for --nprocs {self.nprocs}: one for each that collects; such as {fits}"),
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
        """With a lambda and deviations for such actions, where none were given (docs/learning.md).

        Each component adds noise to the return; a smaller lambda lets in less of it. With that of a few Humanoid-v4
        does not learn to walk, with that of many Hopper-v4 learns to stand. What many components try together, fewer
        must try with larger deviations each, and a single one to the end.
        """
        n = 1 if spec.discrete else spec.act_dim
        lam = 1.0 - min(max(n, 4), 16) / 80.0 if self.lam is None else self.lam
        first, last = (0.0, -2.5) if n == 1 else (-0.5 if n <= 4 else -1.0, -3.5)
        log_std = first if self.log_std is None and not spec.discrete else self.log_std
        to_last = None if log_std is None else min(max(log_std - last, 0.0), 10.0)
        std_fall = to_last if self.std_fall is None else self.std_fall
        return replace(self, lam=lam, log_std=log_std, std_fall=std_fall)

    @property
    def wrappers(self) -> list[str]:
        """Of the environment, the innermost first."""
        return [name.strip() for name in self.env_wrappers.split(",") if name.strip()]

    @property
    def modules(self) -> list[str]:
        """Those that are imported because a setting names them."""
        code = [self.env_command] if self.env_command else [self.env] * (":" in self.env)
        code += [name for name in self.wrappers if name != ATARI]
        code += [self.network] * (self.network not in ("", CNN)) + [self.hook] * bool(self.hook)
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
