"""Normalisers that the ranks update apart, merged: against the statistics of all samples together."""

import copy
import itertools
import pickle
from collections import namedtuple

import gymnasium as gym
import numpy as np
import torch
from harness import fork, raises, run_checks

import mpi_util

fork()
ALONE = None
if mpi_util.nworkers > 1:
    from mpi4py import MPI

    ALONE = MPI.COMM_SELF


class Moments:
    """A running mean as programs write it, on any kind of numbers."""

    def __init__(self, make=np.asarray, shape=(2,)):
        self.make = make
        self.mean, self.var, self.count = make(np.zeros(shape)), make(np.ones(shape)), 0

    def update(self, x):
        total = self.count + len(x)
        delta = x.mean(0) - np.asarray(self.mean)
        m2 = np.asarray(self.var) * self.count + x.var(0) * len(x) + delta**2 * self.count * len(x) / total
        self.mean = self.make(np.asarray(self.mean) + delta * len(x) / total)
        self.var, self.count = self.make(m2 / total), total


Fixed = namedtuple("Fixed", "mean var count")


class Slots:
    __slots__ = ()
    mean = var = count = 1.0


def samples(rank, iteration):
    return np.random.default_rng([rank, iteration]).normal(1e3 * rank, 1 + iteration, (5 * rank + 3, 2))


def check_what_each_rank_adds_counts_once(comm, rank, size):
    for make in (np.asarray, torch.from_numpy):
        rms, seen = Moments(make), []
        for iteration in range(4):
            if iteration != 1:  # a round in which nobody adds anything changes nothing
                rms.update(samples(rank, iteration))
                seen += [samples(k, iteration) for k in range(size)]
            mpi_util.merge_moments({"obs": rms}, comm=comm)
            every = np.concatenate(seen)
            assert rms.count == len(every) and type(rms.count) is int and type(rms.mean) is type(make(every))
            assert np.allclose(rms.mean, every.mean(0)) and np.allclose(rms.var, every.var(0))
            assert len({digest(rms) for rms in mpi_util.rank0_gather(rms.__dict__ | {"make": 0}, comm=comm)}) == 1


def digest(state):
    return repr([np.asarray(state[key]).tolist() for key in ("mean", "var", "count")])


def check_what_all_begin_with_counts_once(comm, rank, size):
    rms = Moments()
    rms.update(samples(7, 7))  # as a resumed run has it
    mpi_util.merge_moments(rms, comm=comm)
    assert rms.count == len(samples(7, 7))
    rms.update(samples(rank, 0))
    mpi_util.merge_moments(rms, comm=comm)
    every = np.concatenate([samples(7, 7), *(samples(k, 0) for k in range(size))])
    assert rms.count == len(every) and np.allclose(rms.mean, every.mean(0)) and np.allclose(rms.var, every.var(0))
    rms.__init__()  # reset: what was there is forgotten
    rms.update(samples(rank, 1))
    mpi_util.merge_moments(rms, comm=comm)
    assert rms.count == sum(len(samples(k, 1)) for k in range(size))


def check_what_is_reset_or_copied_between_merges(comm, rank, size):
    rms = Moments()
    for iteration, n in enumerate([100, 100, 250]):  # as many samples as before, and more
        rms.__init__()
        rms.update(np.random.default_rng([iteration, rank]).normal(10 * iteration, 1, (n, 2)))
        mpi_util.merge_moments(rms, comm=comm)
        assert rms.count == n * size and abs(rms.mean - 10 * iteration).max() < 1 and (rms.var < 2).all()
    for _ in range(3):
        rms = pickle.loads(pickle.dumps(copy.deepcopy(rms)))
        rms.update(samples(rank, 0))
        mpi_util.merge_moments(rms, comm=comm)
    assert rms.count == 250 * size + 3 * sum(len(samples(k, 0)) for k in range(size))


def check_gymnasium(comm, rank, size):
    def make():
        env = gym.make("Pendulum-v1")
        return gym.wrappers.NormalizeReward(gym.wrappers.NormalizeObservation(env))

    for env in (make(), gym.vector.SyncVectorEnv([make, make])):
        env.reset(seed=rank)
        env.action_space.seed(rank)
        for _ in range(20 + rank):
            env.step(env.action_space.sample())
        mpi_util.merge_moments(env, comm=comm)
        inner, envs = (env.envs[-1], 2) if hasattr(env, "envs") else (env, 1)
        steps = envs * sum(20 + k for k in range(size))
        assert steps <= inner.env.obs_rms.count < 2 * steps and inner.env.obs_rms.mean.shape == (3,)
        assert steps <= inner.return_rms.count < steps + 1
        one = [inner.env.obs_rms.mean, inner.env.obs_rms.var, inner.return_rms.mean, inner.return_rms.var]
        assert (
            len({repr([np.asarray(x).tolist() for x in state]) for state in mpi_util.rank0_gather(one, comm=comm)}) == 1
        )
        env.step(env.action_space.sample())  # and it goes on
        env.close()


def play(envs, iteration):
    """Some environments add samples; the first one has been reset, which forgets nothing that is merged."""
    for e, rms in envs.items():
        if iteration == 2 and e == 0:
            rms.__init__()
        if (e + iteration + 1) % 5:
            rms.update(samples(e, iteration))


def check_environments_are_merged_to_the_same_bits_at_any_number_of_ranks(comm, rank, size):
    inside = [
        lambda envs: {e: {"obs": rms} for e, rms in reversed(envs.items())},
        lambda envs: {np.int64(e): [{"obs": rms}] for e, rms in envs.items()},  # in each a vector environment
        lambda envs: {"train": [{"obs": rms} for rms in envs.values()], "eval": Moments()},
    ]
    for n, hold in itertools.product((8, 4, 2), inside):  # so that a rank has several, or none
        envs, one_process = ({e: Moments() for e in some} for some in (range(rank, n, size), range(n)))
        if hold is inside[2]:  # lists count in rank order: blocks, as of mpi_util.share
            envs = {e: Moments() for e in range(rank * n // size, (rank + 1) * n // size)}
        seen = []
        for iteration in range(4):
            for some, where in ((envs, comm), (one_process, ALONE)):
                play(some, iteration)
                mpi_util.merge_moments(hold(some), comm=where)
            seen += [samples(e, iteration) for e in range(n) if (e + iteration + 1) % 5]
            every, rms = np.concatenate(seen), one_process[0]
            assert {digest(vars(own)) for own in envs.values()} <= {digest(vars(rms))}
            assert len({digest(vars(own)) for own in one_process.values()}) == 1
            assert rms.count == len(every)
            assert np.allclose(rms.mean, every.mean(0)) and np.allclose(rms.var, every.var(0))


def check_the_only_one_stays_as_it_is(comm, rank, size):
    rms, plain = Moments(), Moments()
    for iteration in range(5):
        for one in (rms, plain):
            one.update(samples(0, iteration) / 3)
        mpi_util.merge_moments(rms, comm=ALONE)
        mpi_util.merge_moments({4: rms} if rank == 0 else {}, comm=comm)
        assert digest(vars(rms)) == digest(vars(plain))


def check_one_normaliser_in_all_environments_counts_once(comm, rank, size):
    rms = Moments()
    rms.update(samples(rank, 0))
    before = digest(vars(rms))
    mpi_util.merge_moments([{"obs": rms}, {"obs": rms}], comm=comm)
    assert rms.count == sum(len(samples(k, 0)) for k in range(size))
    assert size > 1 or digest(vars(rms)) == before


def check_what_all_environments_begin_with_counts_once(comm, rank, size):
    envs = [Moments() for _ in range(rank + 1)]
    for rms in envs:
        rms.update(samples(7, 7))
    mpi_util.merge_moments(envs, comm=comm)
    envs[-1].update(samples(rank, 0))
    mpi_util.merge_moments(envs, comm=comm)
    every = np.concatenate([samples(7, 7), *(samples(k, 0) for k in range(size))])
    for rms in envs:
        assert rms.count == len(every) and np.allclose(rms.mean, every.mean(0)) and np.allclose(rms.var, every.var(0))


def check_things_of_a_tuple_stay_apart(comm, rank, size):
    one, other = Moments(), Moments()
    one.update(samples(rank, 0))
    mpi_util.merge_moments((one, other), comm=comm)
    assert one.count and not other.count


def check_errors_reach_all(comm, rank, size):
    raises(mpi_util.BatchError, "no object with mean, var and count", lambda: mpi_util.merge_moments(3, comm=comm))
    odd = Moments(shape=(3,) if rank == size - 1 else (2,))
    if size > 1:
        raises(mpi_util.RankMismatchError, f"rank {size - 1}:", lambda: mpi_util.merge_moments(odd, comm=comm))
        some = {"envs": [Moments()], "eval": Moments()} if rank else {"envs": [Moments()]}
        raises(mpi_util.RankMismatchError, "'eval'", lambda: mpi_util.merge_moments(some, comm=comm))
    both = [{"rms": Moments()}, {"rms": Moments(shape=())}]
    raises(mpi_util.RankMismatchError, "'rms'", lambda: mpi_util.merge_moments(both, comm=comm))
    raises(mpi_util.BatchError, "no object with mean", lambda: mpi_util.merge_moments([], comm=comm))
    loop, fixed = Moments(), Fixed(np.zeros(2), np.ones(2), 1)
    del loop.mean
    loop.env = loop
    for holder, text in [(loop, "no object"), (fixed, "takes no values")]:
        raises(mpi_util.BatchError, text, lambda holder=holder: mpi_util.merge_moments(holder, comm=comm))
    mpi_util.rank0_bcast_wts(mine := Moments(shape=(2,)), comm=comm)
    assert mine.mean.shape == (2,)
    raises(mpi_util.WeightsError, "merge_moments", lambda: mpi_util.rank0_bcast_wts(Slots(), comm=comm))


run_checks(globals())
