"""Settings by name, and the options that stand for others: what a command line means before it is parsed."""

from typing import Any

# For Atari's games the settings of Schulman et al. 2017 (arXiv:1707.06347), with one learning rate throughout.
PRESETS = {
    "atari": "--total_steps 10000000 --batch_steps 1024 --num_envs 8 --env_wrappers atari --network cnn"
    " --minibatches 4 --epochs 4 --vf_epochs 4 --clip 0.1 --ent_coef 0.01 --kl_targ 0 --lr 2.5e-4 --vf_lr 2.5e-4"
    " --lr_schedule constant --lam 0.95",
}
INSTEAD = {"batch_size": ("--batch_steps", "--num_envs"), "minibatch_rows": ("--minibatches",)}  # of a preset's options


def preset(name: str, given: dict[str, Any]) -> list[str]:
    """The options that --preset stands for, without those that options beside it replace.

    Args: given: options beside it. Raises: ValueError, one line: there is no such preset.
    """
    if "resume" in given:
        raise ValueError("--preset cannot change on --resume; leave it out")
    if name not in PRESETS:
        raise ValueError(f"--preset {name} is not one of: {', '.join(PRESETS)}")
    if given.get("algo", "ppo") != "ppo":
        raise ValueError(f"--preset {name} is for --algo ppo")
    words = PRESETS[name].split()
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
