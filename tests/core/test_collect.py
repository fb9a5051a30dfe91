"""`collect` and `rollouts` as programs use them: the same bits on any number of ranks, and errors in one line."""

import functools
import itertools
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import mpi_environment, run

import mpi_util
from mpi_util.errors import BatchError, UsageError
from mpi_util.ranks.failure import FailureState
from mpi_util.ranks.state import state

HEAD = """
import collections, random, sys, time
import numpy as np
import mpi_util
if mpi_util.mpi_fork(int(sys.argv[1])) == "parent":
    sys.exit()
mpi_util.set_global_seeds(3)
Step = collections.namedtuple("Step", "obs rew")
weights = {"w": np.zeros(2)}


def play(rng, seed, number, iteration):
    n = 1 + int(rng.exponential(10))
    time.sleep(0.0005 * n)
    rows = {"obs": rng.random((n, 2)) + weights["w"], "draw": (random.random(), np.random.random(n)), "seed": seed}
    return {**rows, "steps": [Step(rows["obs"][0].tolist(), number)] * n, "name": f"{iteration}/{number}"}


def report(batch):
    weights["w"] += 0.1 * batch["obs"].mean(axis=0) + random.random() + np.random.random()
    print(repr(batch).replace("\\n", ""), weights["w"].tobytes().hex())

"""
COLLECT = """
for i in range(3):
    batch = mpi_util.collect(play, weights=weights, seed=5, HOW)
    if batch is not None:
        report(batch)
"""
ROLLOUTS = """
for rollout in mpi_util.rollouts(range(3), weights=weights, seed=5, HOW):
    batch = rollout.gather(play(rollout.rng, rollout.seed, rollout.number, rollout.iteration))
    if batch is not None:
        report(batch)
"""
IN_PLACE = """
buffer = {"steps": [], "obs": []}
for i in range(3):
    for rollout in mpi_util.rollouts(weights=weights, seed=5, HOW):
        assert not any(buffer.values())
        rows = play(rollout.rng, rollout.seed, rollout.number, rollout.iteration)
        for key in buffer:
            buffer[key] += list(rows[key])
        rollout.gather(buffer, in_place=True)
    if mpi_util.rank:
        assert not any(buffer.values())
        continue
    report({"obs": np.array(buffer["obs"]), "steps": buffer["steps"]})
    buffer["steps"].clear()
    buffer["obs"].clear()
"""
CONTINUED = """
def play(rng, number):
    obs = rng.random()
    while True:
        obs += rng.random()
        yield {"obs": np.full((3, 1), obs) + weights["w"], "number": number}

class Trainer:
    def play(self, rng, number):
        return play(rng, number)

trainer = Trainer()
for i in range(3):
    batch = mpi_util.collect(trainer.play, envs=5, weights=weights, seed=5)
    if batch is not None:
        report(batch)
"""
KEPT = """
for rollout in mpi_util.rollouts(range(3), envs=5, weights=weights, seed=5):
    rollout.kept = (rollout.kept or 0.0) + rollout.rng.random()
    batch = rollout.gather({"obs": np.full((3, 1), rollout.kept) + weights["w"]})
    if batch is not None:
        report(batch)
"""
PROGRAMS = {
    "collect-episodes": COLLECT.replace("HOW", "episodes=7"),
    "collect-steps": COLLECT.replace("HOW", "steps=60"),
    "rollouts-episodes": ROLLOUTS.replace("HOW", "episodes=7"),
    "rollouts-steps": ROLLOUTS.replace("HOW", "steps=60"),
    "in-place": IN_PLACE.replace("HOW", "steps=60"),
    "collect-envs": CONTINUED,
    "rollouts-envs": KEPT,
}


def output(program: str, n: int, tmp_path, environment: dict) -> str:
    path = tmp_path / "program.py"
    path.write_text(HEAD + program)
    done = run([sys.executable, path, n], 60, environment)
    assert done.status == 0, done.err
    return done.out


def test_the_same_bits_on_any_number_of_ranks(tmp_path, mpi):
    program = "".join(f"mpi_util.print0({name!r})\n{text}" for name, text in PROGRAMS.items())
    alone = output(program, 1, tmp_path, {})
    assert alone.count("\n") == len(set(alone.splitlines())) == 4 * len(PROGRAMS)
    for n, machines in ((2, 1), (3, 1), (4, 1), (4, 2)):
        environment = mpi_environment(mpi) | ({"MPI_UTIL_MACHINES": str(machines)} if machines > 1 else {})
        assert output(program, n, tmp_path, environment) == alone, (n, machines)


COUNTS = """
sizes = []
for i in range(4):
    batch = mpi_util.collect(play, steps=60, seed=5)
    if batch is not None:
        last = sum(step.rew == len(batch["seed"]) - 1 for step in batch["steps"])
        assert len(batch["obs"]) - last < 60 <= len(batch["obs"])
        sizes.append((len(batch["seed"]), len(batch["obs"])))
played = mpi_util.all_sum(played_here)
found = mpi_util.rank0_gather(mpi_util.collected)
if mpi_util.rank == 0:
    rollouts, steps, unused_rollouts, unused_steps = found[0]
    assert found == [found[0]] * len(found)
    assert [rollouts, steps] == [sum(column) for column in zip(*sizes)]
    assert [rollouts + unused_rollouts, steps + unused_steps] == list(played), (found[0], played)
    print(sizes)
"""
COUNTED = """
played_here, play_one = np.zeros(2, int), play


def play(rng, seed, number, iteration):
    rows = play_one(rng, seed, number, iteration)
    played_here[:] += 1, len(rows["obs"])
    return rows

"""


@pytest.mark.slow
def test_episodes_that_are_not_needed_are_counted(tmp_path, mpi):
    alone = output(COUNTED + COUNTS, 1, tmp_path, {})
    for n, machines in ((3, "1"), (4, "2")):
        environment = mpi_environment(mpi) | ({"MPI_UTIL_MACHINES": machines} if machines > "1" else {})
        assert output(COUNTED + COUNTS, n, tmp_path, environment) == alone


BREAKS = """
import contextlib
def train():
    for rollout in mpi_util.rollouts(itertools.count(), episodes=5, seed=1):
        batch = rollout.gather({"seed": rollout.seed})
        if batch is None:
            continue
        if rollout.iteration == 2:
            LEAVE
with contextlib.suppress(KeyError):
    train()
print("left", mpi_util.collected.rollouts, mpi_util.all_sum(1))
"""


@pytest.mark.left_out(mpi="openmpi", leave=["return", "raise KeyError"])
@pytest.mark.parametrize("leave", ["break", "return", "raise KeyError"])
def test_rank_0_ends_the_loop_of_all_ranks(leave, tmp_path, mpi):
    out = output("import itertools\n" + BREAKS.replace("LEAVE", leave), 3, tmp_path, mpi_environment(mpi))
    assert sorted(out.splitlines()) == ["left 15 3"] * 3


LAST = """
for rollout in mpi_util.rollouts(ITERATIONS, episodes=4, seed=1):
    if rollout.gather({"a": 1}) is not None and rollout.iteration == 2:
        LEAVE
print("left", mpi_util.collect(lambda number: {"n": number}, episodes=2, seed=1, phase="after") is not None)
"""


@pytest.mark.parametrize("iterations", ["range(3)", "total_steps=12"])
def test_rank_0_may_leave_the_last_iteration(iterations, tmp_path, mpi):
    text = LAST.replace("ITERATIONS", iterations)
    out = output(text.replace("LEAVE", "break"), 3, tmp_path, mpi_environment(mpi))
    assert sorted(out.splitlines()) == ["left False"] * 2 + ["left True"]


def test_an_error_in_the_update_ends_the_others_within_the_loop(tmp_path, mpi):
    path = tmp_path / "program.py"
    path.write_text(HEAD + LAST.replace("ITERATIONS", "range(9)").replace("LEAVE", "raise OSError('disk full')"))
    done = run([sys.executable, path, 3], 30, mpi_environment(mpi))
    assert done.status == 1 and "left" not in done.out and "OSError: disk full" in done.err


@pytest.mark.parametrize(
    "call",
    ["seed=1 + mpi_util.rank", "seed=1, iteration=None if mpi_util.rank else 7",
     "seed=1, phase='a' if mpi_util.rank else 'b'"],
)  # fmt: skip
def test_ranks_that_collect_something_else_are_told(call, tmp_path, mpi):
    path = tmp_path / "program.py"
    path.write_text(HEAD + f"mpi_util.collect(lambda: {{'a': 1}}, episodes=4, {call})\nprint('gone on')\n")
    done = run([sys.executable, path, 2], 30, mpi_environment(mpi))
    assert done.status and "collect: all ranks must collect the same" in done.err and not done.out


@pytest.mark.slow
def test_what_stays_behind_is_said_once(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "program.py"
    path.write_text(
        HEAD + "import torch\nnet = torch.nn.Linear(1, 1)\n"
        "for i in range(4):\n"
        "    batch = mpi_util.collect(lambda: {'v': net(torch.ones(2, 1))}, episodes=4, seed=1)\n"
    )
    done = run([sys.executable, path, 2], 60)
    assert done.status == 0 and done.err.count("'v' comes to rank 0 without its gradient") == 1
    assert done.err.count("no weights= and no rank0_bcast_wts") == 1 and done.err.count("\n") == 2


@pytest.mark.parametrize(
    ("weights", "lost"),
    [
        ("weights", ""),
        ("{'w': weights['w'].copy(), 'std': weights['std']}", "w"),
        ("i > 0 and {'w': weights['w'].copy(), 'std': weights['std']}", "w"),
        ("np.copyto(kept, weights['w']) or kept", "weights"),
        ("[weights['w'], weights['std']]", ""),
    ],
)
def test_copies_as_weights_are_noticed(weights, lost, tmp_path, mpi):
    """Not what all ranks set alike, and not arrays that rank 0 replaces."""
    path = tmp_path / "program.py"
    path.write_text(
        HEAD + "weights, kept = {'w': np.zeros(3), 'std': np.ones(1)}, np.zeros(3)\n"
        "for i in range(6):\n"
        "    weights['std'][:] = 1 / (i + 1)\n"
        f"    batch = mpi_util.collect(lambda: {{'v': weights['w'].sum()}}, episodes=4, seed=1, weights={weights})\n"
        "    if batch is not None:\n"
        "        weights['w'] = weights['w'] + 1\n"
    )
    done = run([sys.executable, path, 3], 60, mpi_environment(mpi))
    line = (
        f"mpi_util: collect: what rank 1 was sent as '{lost}' is gone, so results depend on how many ranks there are. "
    )
    assert not done.status and done.err == (f"{line}give the model itself, not a copy of its weights\n" if lost else "")


ALIKE = {  # what all ranks set, or each its own: (before the loop, in it, the model, the update)
    "one generator for goals and minibatches": (
        "rng, model = np.random.default_rng(0), {'w': np.zeros(3), 'goal': np.zeros(2)}",
        "model['goal'][:] = rng.normal(size=2)", "model", "model['w'] += rng.normal()",
    ),
    "two agents that take turns": (
        "rng = np.random.default_rng(mpi_util.rank); agents = [{'w': rng.normal(size=3)} for _ in range(2)]",
        "model = agents[i % 2]", "model", "model['w'] += 1",
    ),
    "rank 0 sets it again": (
        "model.w, model.eps = np.zeros(3), 1.0",
        "model.eps = 1.0 / (1 + i * (mpi_util.rank == 0))", "model", "model.w += 1",
    ),
    "a new model each time": (
        "", "model = Agent(); model.w = np.zeros(3) + i * (mpi_util.rank == 0)", "model", "pass",
    ),
    "a clock": (
        "model.w, model.now = np.zeros(3), 0.0", "model.now = time.perf_counter()", "model",
        "model.w += 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ALIKE.values(), ids=ALIKE)
def test_a_program_that_gives_the_model_itself_is_told_nothing(case, tmp_path):
    before, top, model, update = case
    path = tmp_path / "program.py"
    path.write_text(
        HEAD + f"class Agent: pass\nmodel = Agent()\n{before}\nfor i in range(4):\n    {top}\n"
        f"    batch = mpi_util.collect(lambda rng: {{'v': rng.random()}}, episodes=4, seed=1, weights={model})\n"
        f"    if batch is not None:\n        {update}\n"
    )
    done = run([sys.executable, path, 3], 60)
    assert (done.status, done.err) == (0, "")


def test_a_rank_0_that_ends_in_its_first_rollout_is_named(tmp_path, mpi):
    path = tmp_path / "program.py"
    path.write_text(
        HEAD + "import os\ndef play():\n"
        "    if mpi_util.rank == 0: os._exit(3)\n"
        "    return {'a': 1}\n"
        "for i in range(3): mpi_util.collect(play, episodes=6, seed=1, weights={'w': np.zeros(3)})\n"
    )
    done = run([sys.executable, path, 3], 60, mpi_environment(mpi))
    assert done.status == 3 and "rank 0 ended with status 3" in done.err and "Traceback" not in done.err, done.err


def test_memory_that_a_rank_0_which_lives_does_not_share_is_no_hang(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        HEAD + "import mpi_util.host.segments as segments\n"
        "def attach(ticket): raise FileNotFoundError('closed by the program')\n"
        "def play():\n"
        "    if mpi_util.rank: segments.attach = attach\n"
        "    return {'a': np.zeros(10**6)}\n"
        "for i in range(3): mpi_util.collect(play, episodes=4, seed=1, weights={'w': np.zeros(10**6)})\n"
    )
    done = run([sys.executable, path, 2], 40)
    assert done.status == 1 and "closed by the program" in done.err, done.err


@pytest.mark.parametrize(
    ("call", "error"),
    [("episodes=4 + mpi_util.rank, seed=1", "RankMismatchError: collect: episodes is "),
     ("episodes=4, seed=1, weights=False", ""),
     ("play=lambda: mpi_util.collect(lambda: 1, episodes=1, seed=2, phase='b') or {'a': 1}, episodes=4, seed=1",
      "UsageError: collect: a rollout has collected or dealt too; ")],
)  # fmt: skip
def test_errors_of_dealing_are_those_of_collect(call, error, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        HEAD + f"arguments = dict(play=lambda: {{'a': 1}}) | dict({call})\n"
        "for i in range(3): mpi_util.collect(**arguments)\n"
    )
    done = run([sys.executable, path, 2], 30)
    assert (error in done.err and done.status) if error else (done.status, done.err) == (0, ""), done.err


WRONG = {
    "without-gather": ("if rollout.number == 1: continue\n", "UsageError: rollouts: the body of the loop has ended"),
    "twice": ("rollout.gather({'a': 1})\n", "UsageError: Rollout.gather: called a second time"),
    "dealt-within": (
        "mpi_util.collect(lambda: {'a': 1}, episodes=2, seed=1)\n",
        "UsageError: rollouts: a rollout has collected or dealt too",
    ),
    "left-amid": ("if mpi_util.rank == 1: break\n", "while rank 0 waits for it"),
    "rank-0-left": ("if mpi_util.rank == 0: break\n", "rank 0 has ended while rank 1 waits for it in rollouts"),
    "died": ("if rollout.number == 1: raise OSError('simulator lost')\n", "OSError: simulator lost"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("line", "error"), WRONG.values(), ids=WRONG)
def test_what_a_body_does_wrong_is_said_once(line, error, tmp_path):
    loop = "for rollout in mpi_util.rollouts(range(9), episodes=6, seed=1):\n    time.sleep(0.05)\n"
    path = tmp_path / "program.py"
    path.write_text(HEAD + loop + f"    {line}    rollout.gather({{'a': 1}})\n")
    done = run([sys.executable, path, 2], 30)
    assert done.status and error in done.err, done.err
    assert "Traceback" not in done.err or "OSError" in error
    assert done.err.strip().splitlines()[-1].endswith("2 ranks were stopped")


def test_an_episode_that_is_given_up_on_one_rank_is_a_mismatch(tmp_path, mpi):
    path = tmp_path / "program.py"
    path.write_text(
        HEAD + "for i in range(3):\n"
        "    try:\n"
        "        for rollout in mpi_util.rollouts(episodes=4, seed=1):\n"
        "            time.sleep(0.1)\n"
        "            {i: 0}[1 if rollout.number == 1 else i]\n"
        "            rollout.gather({'a': 1})\n"
        "    except KeyError:\n"
        "        pass\n"
    )
    done = run([sys.executable, path, 3], 30, mpi_environment(mpi))
    assert "RankMismatchError: ranks are in different collective calls" in done.err
    assert "rollouts (next iteration) at" in done.err


@pytest.mark.parametrize("kind", ["episodes", "steps"])
def test_an_episode_that_is_given_up_is_a_mismatch_where_weights_are_sent_too(tmp_path, kind):
    path = tmp_path / "program.py"
    path.write_text(
        HEAD + "weights = {'w': np.zeros(2)}\n"
        "def play(number, iteration):\n"
        "    time.sleep(0.1)\n"
        "    return {'a': {(3, 1): {}}.get((number, iteration), {0: np.ones(1)})[0]}\n"
        "for i in range(3):\n"
        "    try:\n"
        f"        mpi_util.collect(play, {kind}=6, weights=weights, seed=1)\n"
        "    except KeyError:\n"
        "        pass\n"
    )
    done = run([sys.executable, path, 3], 30)
    assert "RankMismatchError: ranks are in different collective calls" in done.err
    assert "collect at" in done.err and "collect (gather) at" in done.err


def test_an_interrupt_amid_a_rollout_ends_all_ranks(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        HEAD + "for rollout in mpi_util.rollouts(range(10**6), episodes=4, seed=1):\n"
        "    time.sleep(0.02)\n    rollout.gather({'a': 1})\n    print(rollout.iteration, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, path, "3"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT and "Traceback" not in err, err


def test_no_iterations_are_none_and_steps_alone_are_endless():
    assert list(mpi_util.rollouts(range(0), episodes=2, seed=1)) == []
    found = [r.gather({"i": r.iteration}) for r in mpi_util.rollouts(episodes=2, total_steps=6, seed=1)]
    assert [batch["i"].tolist() for batch in found if batch] == [[0, 0], [1, 1], [2, 2]]


def test_a_loop_within_the_programs_own_can_begin_at_any_iteration():
    def batch(*iteration):
        for rollout in mpi_util.rollouts(*iteration, episodes=1, seed=1, phase="within"):
            of = rollout.gather({"i": rollout.iteration, "seed": rollout.seed})
        return of["i"].tolist() + of["seed"].tolist()

    whole = [batch() for _ in range(4)]
    assert [i for i, _ in whole] == [0, 1, 2, 3]
    assert [batch(np.int64(2)), batch()] == whole[2:]
    for wrong in -1, 2.5:
        with pytest.raises(mpi_util.UsageError, match="rollouts: iteration is"):
            batch(wrong)
    with pytest.raises(mpi_util.UsageError, match="iterations are numbers"):
        mpi_util.rollouts(2, episodes=1, seed=1, total_steps=3)


def test_an_iteration_is_repeated_by_its_number():
    def play(rng):
        return {"x": rng.random()}

    batches = [mpi_util.collect(play, episodes=3, seed=1, phase="resumed") for _ in range(3)]
    again = mpi_util.collect(play, episodes=3, seed=1, phase="resumed", iteration=1)
    assert again["x"].tolist() == batches[1]["x"].tolist() != batches[2]["x"].tolist()


def test_environments_start_anew_with_another_play_only():
    def count_up(start):
        yield from ({"k": k} for k in itertools.count(start))

    def train(start):
        batches = [mpi_util.collect(lambda: count_up(start), envs=2, seed=1, phase="kept") for _ in range(3)]
        return [batch["k"].tolist() for batch in batches]

    assert train(0) == [[0, 0], [1, 1], [2, 2]]
    assert train(5) == [[5, 5], [6, 6], [7, 7]]


def test_a_gradient_is_not_lost_in_silence():
    torch = pytest.importorskip("torch")
    weight = torch.ones(1, requires_grad=True)
    batch = mpi_util.collect(lambda number: {"logp": [weight * number]}, episodes=3, seed=1, phase="gradients")
    assert [float(x) for x in batch["logp"]] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="does not require grad"):
        sum(batch["logp"]).backward()


def test_a_generator_that_ends_and_a_play_without_rows():
    with pytest.raises(UsageError, match="generator of play has ended"):
        mpi_util.collect(lambda: (row for row in ()), envs=2, seed=1, phase="ends")
    with pytest.raises(UsageError, match="play has returned None"):
        mpi_util.collect(lambda: None, episodes=2, seed=1)
    with pytest.raises(UsageError, match="play has returned None"):
        mpi_util.collect(lambda: (None for _ in range(9)), envs=2, seed=1, phase="yields nothing")
    with pytest.raises(UsageError, match="play asks for 'env'"):
        mpi_util.collect(lambda env: env, episodes=2, seed=1)


def test_environments_of_a_communicator_are_all_played(tmp_path, mpi):
    program = (
        "from mpi4py import MPI\nsome = MPI.COMM_WORLD.Split(mpi_util.rank >= 2)\n"
        "batch = mpi_util.collect(lambda number: ({'n': number} for _ in 'a'), envs=5, seed=1, comm=some)\n"
        "print(batch and batch['n'].tolist())\n"
    )
    assert (
        sorted(output(program, 4, tmp_path, mpi_environment(mpi)).split("\n"))
        == ["", "None", "None"] + ["[0, 1, 2, 3, 4]"] * 2
    )


def test_environments_last_as_long_as_play_and_the_seed():
    def play(step, number, seed):
        yield from ({"x": (seed, k)} for k in itertools.count(0, step))

    def found(step, seed):
        batch = mpi_util.collect(functools.partial(play, step), envs=1, seed=seed, phase="partial")
        return int(batch["x"][0][0]), int(batch["x"][1][0])

    (first, start), (same, following) = found(2, 1), found(2, 1)
    assert (first, start, following) == (same, 0, 2)
    assert found(2, 2) != (first, 4) and found(2, 2)[1] == 2
    assert found(3, 2)[1] == 0


def test_environments_go_on_whatever_else_is_collected_in_their_phase():
    def play():
        yield from ({"k": k} for k in itertools.count())

    found = []
    for _ in range(3):
        found += mpi_util.collect(play, envs=1, seed=1, phase="both")["k"].tolist()
        mpi_util.collect(lambda: {"k": 0}, episodes=2, seed=2, phase="both")
    assert found == [0, 1, 2]


def test_a_rollouts_generator_goes_on():
    for rollout in mpi_util.rollouts(episodes=2, seed=1, phase="rng"):
        assert rollout.rng.random() != rollout.rng.random()
        rollout.gather({"a": 1})


def test_the_phase_is_that_of_the_rollout_after_an_error_that_was_caught():
    def where():
        return state(FailureState).where

    state(FailureState).at({})
    for passes in (False, True):
        try:
            with mpi_util.during("outside"):
                for rollout in mpi_util.rollouts(episodes=2, seed=1, phase="caught"):
                    assert where() == {"phase": "caught", "episode": rollout.number}
                    passes or {}[rollout.number]
                    rollout.gather({"a": 1})
                    assert where() == {"phase": "outside"}
        except KeyError:
            pass
    assert where() == {}


def test_rows_that_cannot_be_gathered_are_not_counted():
    before = mpi_util.collected
    with pytest.raises(BatchError):
        mpi_util.collect(lambda number: {"a" * (number + 1): 1}, episodes=2, seed=1)
    assert mpi_util.collected == before


def test_cuda_begins_with_the_same_seed_whoever_has_played_what():
    torch = pytest.importorskip("torch")
    queued = []
    for n in (2, 3):
        mpi_util.collect(lambda: {"a": 1}, episodes=n, seed=1, phase="cuda", iteration=0)
        queued.append(torch.cuda._lazy_seed_tracker.manual_seed_all_cb[0].__closure__[0].cell_contents)
    assert queued == [torch.initial_seed()] * 2


@pytest.mark.parametrize(
    ("change", "wrong"),
    [({"iteration": -1}, "iteration is a whole number"), ({"iteration": 1.5}, "iteration is a whole number"),
     ({"play": lambda *, env: 1}, "play asks for 'env'"),
     ({"play": lambda: (x for x in "a")}, "play yields"), ({"play": {}}, "play is a function"),
     ({"envs": 2, "episodes": None}, "play is a generator function")],
)  # fmt: skip
def test_arguments_that_make_no_sense(change, wrong):
    arguments = {"play": lambda: {"a": 1}, "episodes": 1, "seed": 1, "phase": "wrong"} | change
    with pytest.raises(UsageError, match=wrong):
        mpi_util.collect(**arguments)


@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_rollouts_change_of_the_weights_is_said_once(tmp_path, mpi, n):
    path = tmp_path / "program.py"
    path.write_text(
        HEAD + "rms = {'mean': np.zeros(3), 'count': np.zeros(1), 'var': np.ones(3)}\n"
        "def normalized():\n"
        "    rms['count'] += 1\n"
        "    rms['var'] = rms['var'] * 0.9\n"  # another array
        "    return {'v': rms['mean'].sum()}\n"
        "for i in range(4):\n"
        "    mpi_util.collect(normalized, episodes=4, seed=1, phase='other', weights=weights)\n"
        "    batch = mpi_util.collect(normalized, episodes=4, seed=1, weights=[weights, rms])\n"
        "    if batch is not None:\n"
        "        rms['mean'] += batch['v'].mean() + 1\n"
    )
    done = run([sys.executable, path, n], 60, mpi_environment(mpi))
    assert done.status == 0 and done.err.count("collect: rollouts change '1/count, 1/var' of weights=; ") == 1
    assert done.err.count("\n") == 1, done.err
