"""Hyperparameters of the learners, the same for every framework, and each algorithm's defaults."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

DEFAULTS: dict[str, dict[str, Any]] = {  # of the learners, and of train.py
    # Schulman et al. 2017 (arXiv:1707.06347), with a stop by KL; chosen on nine environments (docs/learning.md)
    "ppo": {
        "vf_lr": 3e-4, "kl_targ": 0.05, "minibatch_rows": 128, "gamma": None, "lam": None,
        "rew_scale": "returns", "log_std": None, "batch_steps": 2000, "std_fall": None,
    },
    # github.com/pat-coady/trpo; lr is 9e-4 / sqrt(width of the middle layer) there, and vf_lr 1e-2 / sqrt(width)
    "ppo-kl": {
        "lr": 1.1e-4, "vf_lr": 1.25e-3, "log_std_lr": 6.0, "epochs": 20, "kl_targ": 0.003,
        "max_grad_norm": 100.0, "lr_schedule": "constant",
    },
    # Schulman et al. 2015 (arXiv:1502.05477), table 2; the damping is that of openai/baselines and Spinning Up
    "trpo": {"kl_targ": 0.01, "max_grad_norm": 100.0, "batch_steps": 2000},
    # one step per batch, as in Spinning Up, but longer: with 3e-4 Hopper-v4 did not move in 100,000 steps
    "vpg": {"lr": 1e-3, "epochs": 1, "max_grad_norm": 100.0, "batch_steps": 1000},
}  # fmt: skip
RUN, ALGO = "the run", "the algorithm"


def setting(group: str, help: str, default: Any = None, must_be: str = "", short: str = "", **more: Any) -> Any:
    """A field and its option. must_be: range; "": as usual for its type. choices: all values, the default one first."""
    default = more.get("choices", [default])[0]
    return field(default=default, metadata={"group": group, "help": help, "must_be": must_be, "short": short, **more})


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of a policy and a value learner; `Hyper.of` takes the algorithm's own defaults."""

    algo: str = setting(ALGO, "update rule: clipped, KL penalty, natural or vanilla gradient", choices=tuple(DEFAULTS))
    seed: int = setting(RUN, "random seed", 0, "0 or more")
    kl_targ: float = setting(
        ALGO, "mean KL divergence per update, nats: trpo's bound, ppo-kl's target; ppo stops beyond it, 0: never",
        0.0, short="-k",
    )  # fmt: skip
    lr: float = setting(ALGO, "step size of the policy's Adam; trpo has none", 3e-4, "above 0")
    vf_lr: float = setting(ALGO, "step size of the value function's Adam", 1e-3, "above 0")
    epochs: int = setting(ALGO, "most passes of the policy over the batch; trpo makes one step", 10)
    vf_epochs: int = setting(ALGO, "passes of the value function over the batch", 10)
    minibatches: int = setting(ALGO, "minibatches per pass; policies but ppo's: one", 0, "0 or more")
    minibatch_rows: int = setting(ALGO, "approximate rows of a minibatch, if --minibatches is 0", 256)
    clip: float = setting(ALGO, "ppo's probability ratio is clipped to 1 +- X", 0.2, "above 0")
    std_fall: float | None = setting(
        ALGO, "log deviations have bounds, which fall by X; 0: none; ppo: to -3.5 or -2.5", 0.0, "between 0 and 10"
    )
    ent_coef: float = setting(ALGO, "weight of the entropy in the policy's loss", 0.0, "0 or more")
    max_grad_norm: float = setting(ALGO, "gradients with a larger 2-norm are scaled down to it", 0.5, "above 0")
    cg_iters: int = setting(ALGO, "most iterations of trpo's conjugate gradients", 10)
    cg_damping: float = setting(ALGO, "added to the diagonal of trpo's Fisher matrix", 0.1, "0 or more")
    log_std_lr: float = 1.0  # step size of the Gaussian's deviations, in units of `lr`

    @classmethod
    def of(cls, algo: str = "ppo", **given: Any) -> Any:
        """The algorithm's settings, but for those that are given and not None."""
        own = {key: value for key, value in DEFAULTS[algo].items() if key in cls.__dataclass_fields__}
        return cls(algo, **own | {key: value for key, value in given.items() if value is not None})


def users_function(what: str, name: str) -> Callable[..., Any]:
    """The function that `what` names as MODULE:FUNCTION. Raises ValueError: one line: there is none."""
    module, _, function = name.partition(":")
    if "" not in sys.path:
        sys.path.append("")  # a module of the user's folder
    try:
        return getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # of the user's module too
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{what} {name}: {why}; write MODULE:FUNCTION, for a function in MODULE.py") from None
