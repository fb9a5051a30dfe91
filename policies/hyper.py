"""Hyperparameters of the learners, the same for every framework, and each algorithm's defaults."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of a policy and a value learner. None: the algorithm's default, filled in by `resolve`.

    Attributes:
        algo: update rule of the policy: "ppo" (clipped), "ppo-kl" (KL penalty), "trpo" (natural gradient within a
            bound on the KL divergence) or "vpg" (vanilla policy gradient).
        seed: of the order in which minibatches are drawn.
        lr: step size of the policy's Adam (not trpo, which has none).
        epochs: most passes of the policy over the batch (not trpo, which makes one step).
        minibatches: per pass over the batch; 0: as many as have about `minibatch_rows` rows each. Only the
            policy of ppo uses them; the others step on the whole batch. The value function always does.
        minibatch_rows: rows of a minibatch where `minibatches` is 0.
        clip: range of the probability ratio, 1 +- clip (ppo).
        kl_targ: mean KL divergence per update, in nats. ppo-kl steers towards it; ppo stops at the first epoch beyond
            it, 0: never; trpo never exceeds it. vpg has no such target.
        cg_iters: most iterations of conjugate gradients (trpo).
        cg_damping: added to the Fisher matrix's diagonal (trpo).
        cg_subsample: the Fisher matrix uses 1 of this number of rows (trpo).
        ent_coef: weight of the entropy in the policy's loss.
        max_grad_norm: gradients with a larger 2-norm are scaled down to it.
        log_std_lr: step size of the Gaussian's deviations, in units of `lr`.
        vf_lr: step size of the value function's Adam.
        vf_epochs: passes of the value function.
        vf_replay: True: the value function is fitted on the current and the previous batch together.
    """

    algo: str = "ppo"
    seed: int = 0
    lr: float | None = None
    epochs: int | None = None
    minibatches: int | None = None
    minibatch_rows: int | None = None
    clip: float | None = None
    kl_targ: float | None = None
    cg_iters: int | None = None
    cg_damping: float | None = None
    cg_subsample: int | None = None
    ent_coef: float | None = None
    max_grad_norm: float | None = None
    log_std_lr: float | None = None
    vf_lr: float | None = None
    vf_epochs: int | None = None
    vf_replay: bool | None = None

    def resolve(self) -> "Hyper":
        """The same settings with every None filled in. Raises ValueError: `algo` is unknown; it lists those known."""
        if self.algo not in DEFAULTS:
            raise ValueError(f"algo {self.algo!r} is not one of: {', '.join(sorted(DEFAULTS))}")
        defaults = COMMON | DEFAULTS[self.algo]
        return replace(self, **{key: value for key, value in defaults.items() if getattr(self, key) is None})


COMMON = {
    "lr": 3e-4,
    "epochs": 10,
    "minibatches": 0,
    "minibatch_rows": 256,
    "clip": 0.2,
    "kl_targ": 0.0,
    "cg_iters": 10,
    "cg_damping": 0.1,
    "cg_subsample": 1,
    "ent_coef": 0.0,
    "max_grad_norm": 0.5,
    "log_std_lr": 1.0,
    "vf_lr": 1e-3,
    "vf_epochs": 10,
    "vf_replay": False,
}

DEFAULTS = {
    # Schulman et al. 2017 (arXiv:1707.06347), with a stop by KL: on Humanoid-v4 the divergence per update grew from
    # 0.05 to 0.11 in 250,000 steps without it, at falling entropy; with it the return was no worse, at half the passes.
    "ppo": {"kl_targ": 0.03, "vf_lr": 3e-4},
    # github.com/pat-coady/trpo; lr is 9e-4 / sqrt(width of the middle layer) there, and vf_lr 1e-2 / sqrt(width)
    "ppo-kl": {
        "lr": 1.1e-4,
        "epochs": 20,
        "kl_targ": 0.003,
        "max_grad_norm": 100.0,
        "log_std_lr": 6.0,
        "vf_lr": 1.25e-3,
        "vf_replay": True,
    },
    # Schulman et al. 2015 (arXiv:1502.05477), table 2; the damping is that of openai/baselines and Spinning Up
    "trpo": {"kl_targ": 0.01, "max_grad_norm": 100.0},
    # One step per batch, as in Spinning Up, but ten times as long: with 3e-4 Hopper-v4 did not move in 100,000 steps,
    # with 3e-3 the divergence per update is about trpo's.
    "vpg": {"lr": 3e-3, "epochs": 1, "max_grad_norm": 100.0},
}
