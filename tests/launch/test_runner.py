"""A program that runner.py runs is as one that `python` runs: what it sees, prints and raises, and how it ends."""

import json
import os
import py_compile
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import mpi_environment, run

from mpi_util.launch.fork import _split
from mpi_util.ranks import runner

TIMEOUT_S = 60

PROGRAM = '''"""Shows what it is, and ends as its first argument says."""
import atexit, multiprocessing, os, pickle, sys, threading

class Late:
    """A file that is written when the interpreter ends."""
    def __init__(self):
        self.file = open("late.txt", "w")
        self.file.write("whole")
    def __del__(self):
        os.write(1, b"deleted\\n")

class Thing:
    pass

def double(x):
    return 2 * x if x else 1 / x

number: int = 3
if __name__ == "__main__":
    late = Late()
    print(sorted((name, repr(value)) for name, value in globals().items() if name.startswith("__")))
    print(sys.argv, sys.orig_argv, sys.path, sys.flags, sys._xoptions, sys.warnoptions, list(sys.modules))
    print(pickle.dumps(Thing()), vars(sys.modules["__main__"]) is globals(), double.__code__.co_filename)
    atexit.register(print, "atexit")
    threading.Thread(target=lambda: print(threading.main_thread().join(), "a thread that is waited for")).start()
    how = sys.argv[1] if len(sys.argv) > 1 else ""
    if how == "raise": double(0)
    if how == "exit": sys.exit(3)
    if how == "text": sys.exit("no luck")
    if how == "interrupt": raise KeyboardInterrupt
    if how == "hook":
        sys.excepthook = lambda kind, error, trace: print(kind, error, trace.tb_lineno, sys.last_traceback is trace)
        double(0)
    if how == "exit-in-hook":
        sys.excepthook = lambda *_: sys.exit(5)
        double(0)
    if how in ("spawn", "forkserver"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            print(pool.map(double, [number]))
'''
WAYS = {
    "script": ["program.py"],
    "relative": ["./program.py"],
    "link": ["link.py"],
    "pyc": ["program.pyc"],
    "folder": ["folder"],
    "zip": ["program.zip"],
    "module": ["-m", "package.module"],
    "command": ["-c", PROGRAM],
}
OTHERS = {
    "syntax": ["syntax.py"],
    "import": ["imports.py"],
    "latin-1": ["latin.py"],
    "no module": ["-m", "no_such_module"],
    "command-syntax": ["-c", "print(("],
    "pdb": ["-m", "pdb", "-c", "c", "imports.py"],
    "cProfile": ["-m", "cProfile", "-o", "profile", "program.py", "raise"],
    "coverage": ["-m", "coverage", "run", "program.py", "raise"],
    "inspect": ["-i", "program.py", "raise"],
    "spawn": ["program.py", "spawn"],
    "forkserver": ["-m", "package.module", "forkserver"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("programs")
    (made / "folder").mkdir()
    (made / "package").mkdir()
    for name in ("program.py", "folder/__main__.py", "package/module.py"):
        (made / name).write_text(PROGRAM)
    (made / "link.py").symlink_to("package/module.py")
    (made / "syntax.py").write_text("number = 3\nprint((\n")
    (made / "imports.py").write_text("import no_such_module\n")
    (made / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))\n")
    py_compile.compile(str(made / "program.py"), str(made / "program.pyc"))
    with zipfile.ZipFile(made / "program.zip", "w") as archive:
        archive.write(made / "program.py", "__main__.py")
    return made


def outcome(folder, flags, program, by_runner):
    """(status, output, errors, the file that was not closed) of a program."""
    (folder / "late.txt").unlink(missing_ok=True)
    command = [sys.executable, *flags, *([runner.__file__] * by_runner), *program]
    env = {name: value for name, value in os.environ.items() if name != "MPI_UTIL_JOB"}
    done = subprocess.run(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    late = (folder / "late.txt").read_text() if (folder / "late.txt").exists() else None
    texts = [re.sub("0x[0-9a-f]+", "0x", text).replace(f", '{runner.NAME}'", "") for text in (done.stdout, done.stderr)]
    return done.returncode, *texts, late


@pytest.mark.parametrize("flags", [[], ["-O", "-X", "dev"], ["-I"], ["-Wignore", "-uB", "-E"]], ids=" ".join)
@pytest.mark.parametrize("way", WAYS)
def test_a_program_is_run_as_python_runs_it(folder, way, flags):
    if way == "module" and flags == ["-I"]:
        pytest.skip("it is not found")
    for how in ("raise", "exit", *(("", "text", "interrupt", "hook", "exit-in-hook") if not flags else ())):
        expected = outcome(folder, flags, [*WAYS[way], how], False)
        assert outcome(folder, flags, [*WAYS[way], how], True) == expected
        assert expected[0] == {"exit": 3, "": 0, "exit-in-hook": 5, "interrupt": -2}.get(how, 1)
        assert expected[3] == "whole" or how == "exit-in-hook"


@pytest.mark.parametrize("case", OTHERS)
def test_other_programs_are_run_as_python_runs_them(folder, case):
    if case == "coverage":
        pytest.importorskip("coverage")
    flags, program = (OTHERS[case][:1], OTHERS[case][1:]) if case == "inspect" else ([], OTHERS[case])
    assert outcome(folder, flags, program, True) == outcome(folder, flags, program, False)


def test_the_runner_imports_nothing_that_takes_time(folder):
    (folder / "modules.py").write_text("import sys\nprint(*sys.modules)\n")
    found = [set(outcome(folder, ["-S"], ["modules.py"], by_runner)[1].split()) for by_runner in (False, True)]
    with_os = {"os", "stat", "_stat", "posixpath", "genericpath", "os.path", "_collections_abc"}
    assert found[1] - found[0] == {runner.NAME} | with_os


@pytest.mark.parametrize(
    ("arguments", "flags", "program"),
    [
        ("program.py -m x", "", "program.py -m x"),
        ("-B -m module -c", "-B", "-m module -c"),
        ("-uBm module a", "-uB", "-m module a"),
        ("-cpass a", "", "-c pass a"),
        ("-Wignore -X dev -OO -- p.py", "-W ignore -X dev -OO", "p.py"),
        ("-bX dev p.py", "-b -X dev", "p.py"),
    ],
)
def test_flags_of_the_interpreter_are_told_from_the_program(arguments, flags, program):
    assert _split(arguments.split()) == (flags.split(), program.split())


SHOW = """
import json, os, sys, mpi_util
def show(): return [sys.argv, sys.orig_argv, sys.path[0], sys.flags.optimize, str(__spec__ and __spec__.name)]
if mpi_util.mpi_fork(2) == "parent": print(json.dumps(show()))
elif mpi_util.rank == 1: print(json.dumps(show()), flush=True)
"""


@pytest.mark.parametrize("how", [["-OB", "show.py"], ["-OBm", "show"], ["-X", "dev", "-O", "folder"]], ids=" ".join)
def test_a_rank_sees_the_command_line_of_its_parent(tmp_path, mpi, how):
    (tmp_path / "folder").mkdir()
    for name in ("show.py", "folder/__main__.py"):
        (tmp_path / name).write_text(SHOW)
    done = run([sys.executable, *how, "a b", "-c"], TIMEOUT_S, mpi_environment(mpi), cwd=tmp_path)
    rank, parent = map(json.loads, done.out.splitlines())
    if how[0] == "-OBm":  # which becomes -OB -m
        parent[1][1:2] = ["-OB", "-m"]
    assert rank == parent and Path(rank[2]).name in (tmp_path.name, "folder"), done.err


def test_a_script_that_cannot_be_opened_again(tmp_path):
    (tmp_path / "program.py").write_text("import os, mpi_util\nos.remove('program.py')\nmpi_util.mpi_fork(2)\n")
    done = run([sys.executable, "program.py"], TIMEOUT_S, cwd=tmp_path)
    assert done.status == 2 and "can't open file" in done.err and "Traceback" not in done.err
