"""The advice on processes and modes, on phases whose best choice is known."""

import re

import pytest

from trainer.advice import FIRST, LAST, Advice, Machine, Measured, advise, estimate
from trainer.config import Config

ITERATIONS = LAST - FIRST + 1


def measured(n=1, cores=2, work=8.0, asleep=0.0, update=2.0, steps=100, width=1, exchange=1e-4, steal=0.0):
    """What a run under gather on `n` processes measures, if all goes ideally.

    Args:
        work: seconds of rollouts on one core. asleep: of them beside it. steal: which a host takes.
    """
    wall = work + asleep + steal
    rollout = max((work + steal) / min(n, cores), wall / n)
    seen = {"busy": wall, "asleep": asleep + steal, "sleeps": 1000 * bool(asleep), "env_steps": 1000}
    return Measured(rollout, 0.01, update, 0.01, **seen, steps=steps, width=width * ITERATIONS, exchange=exchange)


def said(seen, n, cores=2, mode="gather", pieces=20):
    """The advice: (number of processes, mode, low, high), or None if it knows nothing better."""
    text = advise(seen, (mode, n), Machine(cores, pieces)).splitlines()[1]
    found = re.match(r"--nprocs (\d+)(?: --parallel (\w+))? is likely to be ([\d.]+) to ([\d.]+) x as fast", text)
    assert found or text.startswith("no other --nprocs"), text
    return (int(found[1]), found[2] or mode, float(found[3]), float(found[4])) if found else None


@pytest.mark.parametrize("n", [1, 2, 4])
def test_rollouts_are_shared_and_the_update_is_not(n):
    seen, machine = measured(n, cores=4), Machine(4, 20)
    assert estimate(seen, ("gather", 4), ("gather", n), machine) == pytest.approx(8 / 4 + 2.0, rel=0.02)
    assert estimate(seen, ("gather", 1), ("gather", n), machine) == pytest.approx(8 + 2.0, rel=0.02)
    assert estimate(seen, ("average", 4), ("gather", n), machine) == pytest.approx(8 / 4 + 2.0 / 4 + 0.06, rel=0.02)


@pytest.mark.parametrize(
    "n, cores, update, expected",
    [
        (1, 2, 0.0, (2, "gather", 1.7, 2.0)),  # the rollouts are all
        (1, 2, 8.0, (2, "gather", 1.3, 1.3)),  # and half of it: 16 / 12
        (1, 8, 0.0, (8, "gather", 6.2, 7.9)),
        (1, 2, 99.0, None),  # 8 of 107 s, halved
        (2, 2, 2.0, None),
        (1, 1, 0.0, None),
    ],
)
def test_numbers(n, cores, update, expected):
    found = said(measured(n, cores, update=update, width=2), n, cores)
    assert found == pytest.approx(expected) if expected else found is None


def test_it_never_promises_more_than_the_processes_can_bring():
    for n in (1, 2, 3, 8):
        for cores in (1, 2, 8, 64):
            for mode in ("gather", "average"):
                for kind in ({}, {"asleep": 500.0}, {"steal": 500.0}, {"update": 1e-3}, {"update": 500.0, "steps": 1}):
                    found = said(measured(n, cores, **kind), n, cores, mode)
                    if found:
                        k, way, low, high = found
                        assert 1 < low <= high <= (k / n if way == mode and k > n else k) + 0.05, (n, cores, mode, kind)


def test_more_processes_than_cores_pay_only_where_they_wait_for_something_else():
    assert said(measured(2, width=2), 2) is None
    assert said(measured(2, work=1.0, asleep=20.0, update=0.1), 2)[0] == 4
    assert said(measured(2, work=1.0, steal=20.0, update=0.1), 2) is None  # a host took the cores


def test_no_more_processes_than_there_is_to_share():
    assert said(measured(1, cores=8), 1, cores=8, pieces=3)[0] == 2


def test_averaging_is_advised_where_its_steps_are_long_and_run_on_one_core():
    long = {"n": 4, "cores": 4, "update": 6.0}
    assert said(measured(**long, exchange=1e-5), 4, 4)[1] == "average"
    assert said(measured(**long, exchange=1.0), 4, 4) is None  # a dear exchange
    assert said(measured(**long, exchange=1e-5, width=4), 4, 4) is None  # the update has all cores already
    assert said(measured(**long, exchange=1e-5, steps=20_000), 4, 4) is None  # short steps are mostly overhead
    assert said(measured(1, update=60.0, exchange=0.0), 1) is None  # one process cannot know what an exchange takes


def test_it_speaks_once_and_asks_for_an_exchange_before():
    advice = Advice(Config("Env-v0"), 2, 2)
    phases = {"rollout": 1.0, "gather": 0.1, "update": 0.9, "bcast": 0.0}
    said, asked = [], []
    for _ in range(LAST + 3):
        asked.append(advice.needs_exchange)
        said.append(advice.after(phases, (2.0, 0.0, 0.0), 1000, (10, 2), 1e-4))
    assert [i + 1 for i, text in enumerate(said) if text] == [LAST] == [i + 1 for i, ask in enumerate(asked) if ask]
    assert "rollout 50%, gather 5%, update 45%, bcast 0% of 2.00 s an iteration" in said[LAST - 1]
    assert said[LAST - 1].endswith("if rollouts took no time, the run would be 2.0 x as fast")
    assert FIRST > 1
