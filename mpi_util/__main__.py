"""python -m mpi_util COMMAND ..., or mpi-util COMMAND ...: training, and the tools around a run."""

import importlib
import sys

COMMANDS = {  # name: module with a `main` of the arguments, what it does
    "train": ("train", "train a policy on N processes: train.py"),
    "watch": ("trainer.play", "play what a run has learned, in a window or as a video"),
    "doctor": (".doctor.checks", "will a job run on this machine, and if not, what is to be done"),
    "plot": (".runs.plot", "curves of runs, their scaling, where their time goes"),
    "grid": (".runs.shell_grid", "run a script once for each combination of options"),
}


def main() -> int:
    """Runs the command that the command line names; returns the exit status."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print("usage: python -m mpi_util COMMAND ...; each has a --help\n")
        print("\n".join(f"  {command:<8} {what}" for command, (_, what) in COMMANDS.items()))
        return 0
    if name not in COMMANDS:
        print(f"mpi_util: {name!r} is no command; these are: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    arguments = sys.argv[2:]
    ours = "it comes with the whole repository, not with the folder mpi_util alone"
    try:
        module = importlib.import_module(COMMANDS[name][0], __package__)
        if name != "train":
            return int(module.main(arguments))
    except ModuleNotFoundError as error:
        if f".{name}" in (error.name or ""):
            print(f"mpi_util {name}: mpi_util/{name}/, which is needed for that, is missing", file=sys.stderr)
            return 2
        hint = ours if error.name in ("train", "trainer") else f"pip install {error.name}"
        print(f"mpi_util {name}: {error}; {hint}", file=sys.stderr)
        return 2
    sys.argv[1:] = arguments
    return int(module.run())


if __name__ == "__main__":
    sys.exit(main())
