"""Settings by name, and the options that stand for others: what a command line means before it is parsed."""

from typing import Any

# By algorithm: the settings of the tables in docs/learning.md, and for Atari's games those of Schulman et al. 2017
# (arXiv:1707.06347) with one learning rate throughout; then what an environment needs besides.
PRESETS: dict[str, dict[str, str]] = {
    "atari": {
        "ppo": "--batch_steps 1024 --num_envs 8 --env_wrappers atari --network cnn"
        " --minibatches 4 --epochs 4 --vf_epochs 4 --clip 0.1 --ent_coef 0.01 --kl_targ 0 --lr 2.5e-4 --vf_lr 2.5e-4"
        " --gamma 0.99 --lam 0.95"
    },
    "mujoco": {
        "ppo": "--batch_steps 2048 --num_envs 16 --minibatches 32 --kl_targ 0 --lr 3e-4 --lr_schedule linear"
        " --gamma 0.99 --lam 0.95",
        "trpo": "--algo trpo --batch_steps 2048 --num_envs 16 --lr_schedule linear",
        "vpg": "--algo vpg --batch_steps 1024 --num_envs 16 --lr 1e-3",
    },
}
MILLION = "--total_steps 1000000"
STEPS = {("atari", "ppo"): "--total_steps 10000000", ("mujoco", "ppo"): MILLION, ("mujoco", "trpo"): MILLION}
ADDED = {
    "HalfCheetah": ("--log_std -1", "chosen for it on seed 0"),
    "Swimmer": ("--gamma 0.999", "what a stroke brings comes late; chosen on seed 1"),
}
INSTEAD = {"batch_size": ("--batch_steps", "--num_envs"), "minibatch_rows": ("--minibatches",)}  # of a preset's options
ADDED_TRPO = ADDED | {"Hopper": ("--rew_scale returns", "without it it learns to stand; chosen on seed 1")}


def preset(name: str, given: dict[str, Any]) -> list[str]:
    """The options that --preset stands for, without those that options beside it replace.

    Args: given: options beside it. Raises: ValueError, one line: there is no such preset.
    """
    algo, env = given.get("algo", "ppo"), given.get("env", "")
    if "resume" in given:
        raise ValueError("--preset cannot change on --resume; leave it out")
    if name not in PRESETS:
        raise ValueError(f"--preset {name} is not one of: {', '.join(PRESETS)}")
    if algo not in PRESETS[name]:
        raise ValueError(f"--preset {name} has no settings for --algo {algo}; it has: {', '.join(PRESETS[name])}")
    added = (ADDED_TRPO if algo == "trpo" else ADDED).get(env.split("-")[0], ("", ""))[0]
    words = f"{STEPS.get((name, algo), '')} {PRESETS[name][algo]} {added}".split()
    without = {replaced for option in given for replaced in INSTEAD.get(option, ())}
    return [word for pair in zip(words[::2], words[1::2]) if pair[0] not in without for word in pair]


def plain(arguments: list[str]) -> tuple[list[str], bool]:
    """Options as they are defined: --total-steps is --total_steps. Returns also whether --nprocs is auto: left out."""
    words = []
    for word in arguments:
        option, *rest = word.split("=", 1)
        words.append("=".join([option.replace("-", "_").replace("__", "--", 1), *rest]) if word[:2] == "--" else word)
    auto = [i for i, word in enumerate(words) if word == "--nprocs=auto" or words[i : i + 2] == ["--nprocs", "auto"]]
    for i in reversed(auto):
        del words[i : i + 1 + (words[i] == "--nprocs")]
    return words, bool(auto)
