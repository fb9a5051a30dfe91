"""Where the time of a run goes, and which number of processes and mode would suit it: Amdahl's law on measured phases.

Rollouts are shared by all processes. Under `gather` the update is rank 0's, with the whole machine; under `average` it
is shared too, and every optimizer step costs an exchange among all. Processes beyond the cores gain time only where
they wait for something else than a core, as environments may that are not computed here.
"""

import time
from dataclasses import dataclass, fields

FIRST, LAST = 2, 6  # iterations that are measured; the first one warms up
WORTH = 0.03  # a larger number of processes has to gain so much


@dataclass
class Measured:
    """Sums over the iterations measured; seconds of wall-clock time where nothing else is said.

    Attributes:
        rollout, gather, update, bcast: of the phases.
        busy, cpu, asleep: of work in the rollouts, all processes together: in all, on a core, and waiting for something
            else than a core.
        update_cpu: processor time of rank 0 in its update.
        steps: number of optimizer steps.
        exchange: of one exchange among all processes, as an optimizer step under `average` needs it.
    """

    rollout: float = 0.0
    gather: float = 0.0
    update: float = 0.0
    bcast: float = 0.0
    busy: float = 0.0
    cpu: float = 0.0
    asleep: float = 0.0
    update_cpu: float = 0.0
    steps: int = 0
    exchange: float = 0.0

    @property
    def total(self):
        """Seconds of all phases."""
        return self.rollout + self.gather + self.update + self.bcast


def estimate(measured, mode, n, cores, now):
    """Seconds that the measured iterations would take.

    Args:
        measured: Measured.
        mode, n: "gather" or "average", and a number of processes, 1 or more.
        cores: that the run may use.
        now: (mode, n) of the run that was measured.

    Returns:
        float.
    """
    now_mode, now_n = now
    rollout = max(measured.cpu / min(n, cores), (measured.cpu + measured.asleep) / n)
    moved = (measured.gather + measured.bcast) if n > 1 else 0.0
    if mode == now_mode == "gather":
        return rollout + measured.update + moved
    shared = measured.update_cpu
    if now_mode == "average":
        shared = max(shared * now_n - measured.steps * measured.exchange * min(now_n, cores), shared)
    if mode == "gather" or n == 1:
        return rollout + (shared if now_mode == "average" else measured.update) + moved
    exchange = measured.exchange * max(1.0, n / max(now_n, cores))
    return rollout + shared / min(n, cores) + measured.steps * exchange + moved


def advise(measured, cores, now):
    """What a person is told.

    Args: as for `estimate`.

    Returns:
        str, two lines.
    """
    mode, n = now
    counts = sorted({1, n, *(2**k for k in range(1, 7) if 2**k <= 2 * max(cores, n)), cores})
    times = {(m, k): estimate(measured, m, k, cores, now) for m in ("gather", "average") for k in counts}
    best = min(times.values())
    choice = next(way for way in [now, *times] if times[way] <= (1.0 + WORTH) * best)
    shares = ", ".join(
        f"{name} {getattr(measured, name) / measured.total:.0%}" for name in ("rollout", "gather", "update", "bcast")
    )
    serial = measured.update / max(estimate(measured, "gather", 1, cores, now), 1e-9) if mode == "gather" else None
    limit = f"; the update alone bounds what more processes bring to {1 / serial:.1f} x one" if serial else ""
    seconds = measured.total / (LAST - FIRST + 1)
    first = f"time: {shares} of {seconds:.2f} s an iteration, with {n} process{'es' * (n > 1)} on {cores} cores{limit}"
    if choice == now:
        return f"{first}\nno other --nprocs or --parallel is likely to be faster"
    gain = times[now] / times[choice]
    return f"{first}\n--nprocs {choice[1]} --parallel {choice[0]} is likely to be faster: {gain:.1f} x, by estimate"


class Advice:
    """Collects the phases of the first iterations, and speaks once."""

    def __init__(self, mode, n, cores):
        """Args: mode, n: of this run. cores: that it may use."""
        self.now, self.cores = (mode, n), cores
        self.iteration = 0
        self.measured = Measured()

    @property
    def needs_exchange(self):
        """True in the iteration after which somebody has to measure an exchange; on all ranks alike."""
        return self.iteration == LAST - 1 and self.now[1] > 1

    def after(self, seconds, work, update, exchange_s):
        """Takes in an iteration.

        Args:
            seconds: dict of the phases' seconds.
            work: (busy, cpu, asleep) as Measured has them. update: (update_cpu, steps).
            exchange_s: seconds of one exchange, in the iteration that needs it.

        Returns:
            str: the advice, after the last iteration that is measured; else "".
        """
        self.iteration += 1
        if not FIRST <= self.iteration <= LAST:
            return ""
        phases = (seconds[name] for name in ("rollout", "gather", "update", "bcast"))
        for field, value in zip(fields(Measured), (*phases, *work, *update, exchange_s)):
            setattr(self.measured, field.name, getattr(self.measured, field.name) + value)
        return advise(self.measured, self.cores, self.now) if self.iteration == LAST else ""


def timed(exchange, n=20):
    """Median seconds of a call. Args: exchange: function of no arguments. n: number of calls."""
    times = []
    for _ in range(n):
        began = time.perf_counter()
        exchange()
        times.append(time.perf_counter() - began)
    return sorted(times)[n // 2]
