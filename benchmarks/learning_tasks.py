"""The tasks of benchmarks.learning: settings, steps and seeds of each, and the published figures beside them.

The figures are those of Tianshou's comparison tables (https://github.com/thu-ml/tianshou/tree/master/examples/mujoco):
its own, and those of others as its authors have read them off graphs.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch

EVAL_EVERY = 30_000  # steps; Tianshou's figures come from evaluations as far apart
FIRST_SEED = 20  # of the table; settings were chosen on lower ones
M = 1_000_000

DEFAULTS = ""
FIXED = (  # PPO as it is usually set: the same lambda and minibatches whatever the actions, no stop by KL
    "--batch_steps 2048 --num_envs 16 --minibatches 32 --kl_targ 0 --lr 3e-4 --lr_schedule linear"
    " --gamma 0.99 --lam 0.95 --log_std -0.5 --std_fall 0"
)
TRPO = "--algo trpo --batch_steps 2048 --num_envs 16 --lr_schedule linear"

# Who reached a figure: of Tianshou's own results, or of what its tables quote.
T_PPO, T_A2C, T_TRPO, T_REINFORCE = (f"{name}, Tianshou" for name in ("PPO", "A2C", "TRPO", "REINFORCE"))
KOSTRIKOV, PAPER_TRPO = "PPO, pytorch-a2c-ppo-acktr", "TRPO, in the PPO paper"
BASELINES_TRPO, SPINUP_VPG, SPINUP_PPO = "TRPO, Baselines", "VPG, Spinning Up", "PPO, Spinning Up"

# Mean return of 100 episodes with uniformly random actions, seeds 0 to 99: where a normalised score is 0.
RANDOM = {
    "HalfCheetah-v4": -282.5,
    "Hopper-v4": 17.7,
    "Walker2d-v4": 2.6,
    "Ant-v4": -46.9,
    "Swimmer-v4": 0.8,
    "Humanoid-v4": 120.9,
    "Reacher-v4": -43.4,
    "InvertedPendulum-v4": 6.2,
    "InvertedDoublePendulum-v4": 59.1,
    "HalfCheetah-v5": -267.7,
    "Hopper-v5": 17.0,
    "Walker2d-v5": 1.9,
    "Ant-v5": -47.5,
    "Swimmer-v5": 3.2,
    "Humanoid-v5": 109.9,
    "Reacher-v5": -42.9,
    "InvertedPendulum-v5": 5.6,
    "InvertedDoublePendulum-v5": 50.1,
}


@dataclass(frozen=True)
class Group:
    """Tasks of one algorithm, with the same settings.

    Attributes:
        rank: of its importance; groups of one rank share a place in the order of work.
        seeds: how many.
        published: by environment: figures with who reached them. The highest is the target for the best point of the
            mean curve.
        added: by environment: options that this one needs besides the settings, and why.
        last: by environment, where it has a target of its own: least mean over seeds, and least seed, of the training
            returns in the last tenth.
    """

    title: str
    rank: int
    steps: int
    seeds: int
    settings: str
    published: dict[str, tuple[tuple[float, str], ...]]
    added: dict[str, tuple[str, str]]
    last: dict[str, tuple[float, float]] = field(default_factory=dict)


BEST_1M = {  # of any on-policy algorithm after a million steps
    "HalfCheetah-v4": ((5784, T_PPO),),
    "Hopper-v4": ((2609, T_PPO),),
    "Walker2d-v4": ((4000, KOSTRIKOV), (3589, T_PPO)),
    "Ant-v4": ((3485, T_A2C), (3258, T_PPO)),
    "Swimmer-v4": ((121, PAPER_TRPO), (120, SPINUP_PPO), (67, T_PPO)),
    "Reacher-v4": ((-4.1, T_PPO),),
    "InvertedPendulum-v4": ((1000, T_PPO),),
    "InvertedDoublePendulum-v4": ((9258, T_A2C), (9231, T_PPO)),
}
A2C_HUMANOID = {"Humanoid-v4": ((1726, T_A2C), (787, T_PPO))}
BEST_1M_V5 = {env.replace("-v4", "-v5"): figures for env, figures in (BEST_1M | A2C_HUMANOID).items()}
ADDED = {
    "HalfCheetah-v4": ("--log_std -1", "chosen for it on seed 0"),
    "Swimmer-v4": ("--gamma 0.999", "what a stroke brings comes late; chosen on seed 1"),
}
ADDED_TRPO = ADDED | {"Hopper-v4": ("--rew_scale returns", "without it it learns to stand; chosen on seed 1")}

GROUPS = {
    "PPO-default-1M": Group(
        "PPO with train.py's default settings, one million steps, against the best of any on-policy algorithm", 0, M, 5,
        DEFAULTS, BEST_1M | A2C_HUMANOID, {}, {"Humanoid-v4": (4000, 1726)},
    ),
    "PPO-1M": Group(
        "PPO with the same lambda and minibatches whatever the actions, one million steps", 1, M, 5, FIXED,
        BEST_1M, ADDED,
    ),
    "TRPO-1M": Group(
        "TRPO, one million steps", 1, M, 3, TRPO,
        {
            "HalfCheetah-v4": ((4471, T_TRPO),),
            "Hopper-v4": ((2200, BASELINES_TRPO), (2046, T_TRPO)),
            "Walker2d-v4": ((3827, T_TRPO),),
            "Ant-v4": ((2867, T_TRPO),),
            "Swimmer-v4": ((121, PAPER_TRPO), (41, T_TRPO)),
            "Humanoid-v4": ((810, T_TRPO),),
            "Reacher-v4": ((-5.1, T_TRPO),),
            "InvertedPendulum-v4": ((1000, T_TRPO),),
            "InvertedDoublePendulum-v4": ((8435, T_TRPO),),
        },
        ADDED_TRPO,
    ),
    "PPO-default-1M-v5": Group(
        "The first table in the environments' version 5, beside the figures of version 4", 1, M, 5, DEFAULTS,
        BEST_1M_V5, {},
    ),
    "PPO-default-overlap-1M": Group(
        "The first table with --overlap", 2, M, 5, f"{DEFAULTS} --overlap".strip(), BEST_1M | A2C_HUMANOID, {},
    ),
    "VPG-3M": Group(
        "VPG, three million steps", 3, 3 * M, 3, "--algo vpg",
        {
            "HalfCheetah-v4": ((884, T_REINFORCE), (600, SPINUP_VPG)),
            "Hopper-v4": ((800, SPINUP_VPG), (396, T_REINFORCE)),
            "Walker2d-v4": ((460, SPINUP_VPG), (412, T_REINFORCE)),
            "Ant-v4": ((475, T_REINFORCE), (5, SPINUP_VPG)),
            "Swimmer-v4": ((51, SPINUP_VPG), (35, T_REINFORCE)),
            "Humanoid-v4": ((438, T_REINFORCE),),
            "Reacher-v4": ((-10.5, T_REINFORCE),),
            "InvertedPendulum-v4": ((999, T_REINFORCE),),
            "InvertedDoublePendulum-v4": ((1060, T_REINFORCE),),
        },
        {},
    ),
    "PPO-default-3M": Group(
        "PPO with train.py's default settings, three million steps, A2C's figures included", 4, 3 * M, 5, DEFAULTS,
        {
            "HalfCheetah-v4": ((7337, T_PPO),),
            "Hopper-v4": ((3128, T_PPO),),
            "Walker2d-v4": ((4896, T_PPO),),
            "Ant-v4": ((5237, T_A2C), (4079, T_PPO)),
            "Swimmer-v4": ((120, SPINUP_PPO), (81, T_PPO)),
            "Humanoid-v4": ((5317, T_A2C), (1360, T_PPO)),
        },
        {},
    ),
    "PPO-default-10M": Group(
        "PPO with train.py's default settings, ten million steps", 5, 10 * M, 5, DEFAULTS, {"Humanoid-v4": ()}, {},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One environment of a group. steps: of each run, where not the group's, to try the program."""

    group: str
    env: str
    steps: int

    @property
    def name(self) -> str:
        """As --only knows it; also the folder of its runs."""
        return f"{self.group}/{self.env}"

    @property
    def settings(self) -> str:
        """train.py's options but for steps, evaluations and seed."""
        group = GROUPS[self.group]
        return " ".join(filter(None, [group.settings, group.added.get(self.env, ("", ""))[0]]))

    @property
    def seeds(self) -> list[int]:
        """Those of the table."""
        return list(range(FIRST_SEED, FIRST_SEED + GROUPS[self.group].seeds))

    @property
    def published(self) -> tuple[tuple[float, str], ...]:
        """Figures and who reached them, the highest first."""
        return tuple(sorted(GROUPS[self.group].published[self.env], reverse=True))

    @property
    def command(self) -> str:
        """Of a run, but for its seed and folder."""
        limits = f"--total_steps {self.steps} --eval_every {min(EVAL_EVERY, self.steps // 2)}"
        return " ".join(filter(None, ["train.py", self.env, limits, self.settings]))

    def arguments(self, seed: int) -> list[str]:
        """train.py's arguments, without the folder of the results."""
        return [*shlex.split(self.command)[1:], "--seed", str(seed)]


def tasks(patterns: Sequence[str] = ("*",), steps: int | None = None) -> list[Task]:
    """The tasks that match one of these patterns, such as PPO-1M/*, in the order of their importance."""
    known = [Task(key, env, steps or group.steps) for key, group in GROUPS.items() for env in group.published]
    return [task for task in known if any(fnmatch(task.name, pattern) for pattern in patterns)]
