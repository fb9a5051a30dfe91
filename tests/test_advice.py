"""The advice on processes and modes, on phases whose best choice is known."""

import pytest

from policies.advice import FIRST, LAST, Advice, Measured, advise, estimate


def measured(n=1, cores=2, cpu=8.0, asleep=0.0, update=2.0, steps=100, exchange=1e-4):
    """What a run under gather on `n` processes measures, if all goes ideally."""
    rollout = max(cpu / min(n, cores), (cpu + asleep) / n)
    work = {"busy": cpu + asleep, "cpu": cpu, "asleep": asleep}
    return Measured(rollout, 0.01, update, 0.01, **work, update_cpu=update, steps=steps, exchange=exchange)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_rollouts_are_shared_and_the_update_is_not(n):
    seen = measured(n, cores=4)
    assert estimate(seen, "gather", 4, 4, ("gather", n)) == pytest.approx(8 / 4 + 2.0 + 0.02, rel=0.02)
    assert estimate(seen, "gather", 1, 4, ("gather", n)) == pytest.approx(8 + 2.0, rel=0.02)
    assert estimate(seen, "average", 4, 4, ("gather", n)) == pytest.approx(8 / 4 + 2.0 / 4 + 0.03, rel=0.02)


def test_more_processes_than_cores_pay_only_where_they_wait_for_something_else():
    text = advise(measured(n=2, cores=2), 2, ("gather", 2))
    assert "no other" in text or "--nprocs 2" in text
    assert "--nprocs 4" in advise(measured(n=2, cores=2, cpu=1.0, asleep=20.0), 2, ("gather", 2))


def test_a_dear_exchange_favours_gather():
    assert "average" in advise(measured(n=4, cores=4, update=6.0, exchange=1e-5), 4, ("gather", 4)).splitlines()[1]
    assert "no other" in advise(measured(n=4, cores=4, update=6.0, exchange=1.0), 4, ("gather", 4))


def test_it_speaks_once_and_asks_for_an_exchange_before():
    advice = Advice("gather", 2, 2)
    phases = {"rollout": 1.0, "gather": 0.1, "update": 0.9, "bcast": 0.0}
    said, asked = [], []
    for _ in range(LAST + 3):
        asked.append(advice.needs_exchange)
        said.append(advice.after(phases, (2.0, 2.0, 0.0), (0.9, 10), 1e-4))
    assert [i + 1 for i, text in enumerate(said) if text] == [LAST] == [i + 1 for i, ask in enumerate(asked) if ask]
    assert "rollout 50%, gather 5%, update 45%, bcast 0% of 2.00 s an iteration" in said[LAST - 1]
    assert FIRST > 1
