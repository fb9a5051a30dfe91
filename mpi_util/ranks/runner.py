"""Runs the program of a rank that mpi_fork has started, in the rank's process, the way `python` runs a program.

    python [flags] runner.py (script | folder | zip | -m module | -c command) [arguments]

An atexit function cannot know the status of `sys.exit(3)`; this file sees it, and calls `on_end`. It is the outermost
frame of the stack; all else is as if the interpreter ran the program: `__main__`, sys.argv, sys.path, tracebacks,
the order in which the process ends. It imports nothing of this package and nothing that takes time to import.
"""

import os
import sys
from _frozen_importlib_external import SourceFileLoader, SourcelessFileLoader  # the interpreter has loaded it

TYPE_CHECKING = False  # of `typing`, which takes time to import
if TYPE_CHECKING:
    from collections.abc import Callable  # noqa: F401
    from types import CodeType, TracebackType

NAME = "_mpi_util_runner"  # of this module in sys.modules while it runs a program
COLON = "\x1f:"  # stands for an argument `:` on a launcher's command line
HIGH_FD = 200  # above what MPI opens, below the lowest limits
STACK_SIGNAL = 61  # SIGRTMAX - 3 of Linux, at which a rank writes its stack; SIGUSR1 and 2 are the programs'
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")  # in which a launcher numbers its ranks

# Set by failure.py: called with the exception, or SystemExit, that ends the program.
on_end = None  # type: Callable[[BaseException], None] | None


def register() -> None:
    """Lets mpi_fork's parent know this rank, and opens the FIFO that closes when the rank ends."""
    rank = next(filter(None, map(os.environ.get, RANKS)), "0")
    try:
        job = os.environ["MPI_UTIL_JOB"]
        with open(os.path.join(job, f"rank-{rank}"), "w") as file:
            file.write(f'{{"pid": {os.getpid()}}}')
        fifo = os.open(os.path.join(job, f"alive-{rank}"), os.O_WRONLY | os.O_NONBLOCK)
        # Linux closes a dying process's files from the highest number down. hydra kills the other ranks when it sees a
        # socket close; the FIFO must close before, or the parent cannot tell which rank died first.
        os.dup2(fifo, HIGH_FD, inheritable=False)
        os.write(HIGH_FD, b"\n")
        os.close(fifo)
        import faulthandler  # a rank that hangs above mpi_fork tells where

        stack = os.open(os.path.join(job, f"stack-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        faulthandler.register(STACK_SIGNAL, stack)
        with open(f"/proc/{(leader := os.getsid(0))}/environ", "rb") as file:
            ours = job.encode() in file.read()  # and not the session of a terminal
        with open(f"/proc/{leader}/stat") as file:
            began = file.read().rpartition(")")[2].split()[19]
        if ours:
            with open(os.path.join(job, f"session-{leader}"), "w") as file:
                file.write(began)
    except (OSError, KeyError):
        return  # the job's folder has gone


def become_program() -> tuple[str, str]:
    """Makes `__main__`, sys.argv and sys.orig_argv those of the program. Returns what to run: (option or "", what)."""
    del sys.orig_argv[-len(sys.argv)], sys.argv[0]
    for words in (sys.argv, sys.orig_argv):
        words[:] = [":" if word == COLON else word for word in words]
    option = sys.argv[0] if sys.argv[0] in ("-m", "-c") else ""
    main = type(sys)("__main__")
    given = {name: value for name, value in globals().items() if name.startswith("__")}  # differs between versions
    vars(main).update(given | {"__doc__": None, "__loader__": sys.__loader__})
    for name in ("__file__", "__cached__"):
        vars(main).pop(name, None)
    if "__annotations__" in given:
        main.__annotations__ = {}
    sys.modules[NAME], sys.modules["__main__"] = sys.modules["__main__"], main
    return option, sys.argv.pop(1) if option else os.path.join(os.getcwd(), sys.argv[0])


def is_package(path: str) -> bool:
    """True for a folder or zip file, which holds a `__main__`."""
    for hook in sys.path_hooks:
        try:
            return bool(hook(path))
        except ImportError:
            continue
    return False


def set_first_path(path: str, always: bool = False) -> None:
    """Sets what `python` puts before its path for a program; `always`: with -I and -P too."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = path  # in place of this file's folder
    elif always:
        sys.path.insert(0, path)


def code_of_script(path: str) -> "CodeType":
    """Compiles a script, or loads a .pyc; tells `__main__` where it is from. SystemExit 2: it cannot be opened."""
    loader = (SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader)("__main__", path)
    vars(sys.modules["__main__"]).update(__file__=path, __cached__=None, __loader__=loader)
    code = loader.get_code("__main__") if isinstance(loader, SourcelessFileLoader) else None
    try:
        return code or compile(loader.get_data(path), path, "exec", dont_inherit=True)
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        sys.exit(2)


def code_of_command(source: str) -> "CodeType":
    """Compiles the text that follows -c."""
    if sys.version_info >= (3, 14) and source[:1].isspace():
        import textwrap

        source = textwrap.dedent(source)
    return compile(source, "<string>", "exec", dont_inherit=True)


def hide_from_tracebacks() -> None:
    """What sys.excepthook gets of the exception that ends the program begins with the program's own lines."""
    hook = sys.excepthook

    def without_runner(kind: type[BaseException], error: BaseException, trace: "TracebackType | None") -> None:
        sys.excepthook = hook
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        error.__traceback__ = sys.last_traceback = trace
        hook(kind, error, trace)

    sys.excepthook = without_runner


if __name__ == "__main__":
    register()
    _option, _what = become_program()
    try:
        if _option == "-c":
            set_first_path("")
            exec(code_of_command(_what), vars(sys.modules["__main__"]))  # noqa: S102
        elif _option == "-m" or is_package(_what):
            set_first_path(os.getcwd() if _option else _what, always=not _option)
            from runpy import _run_module_as_main  # type: ignore[attr-defined]

            _run_module_as_main(_what if _option else "__main__", alter_argv=bool(_option))
        else:
            set_first_path(os.path.dirname(os.path.realpath(_what)))
            exec(code_of_script(_what), vars(sys.modules["__main__"]))  # noqa: S102
    except BaseException as error:
        if on_end:
            on_end(error)
        hide_from_tracebacks()
        raise
