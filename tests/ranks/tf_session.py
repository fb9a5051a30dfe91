"""tf.compat.v1 sessions: the 2017 signatures, and the operations of mpi_tf. Checked by tf_all.py."""

import numpy as np
import tensorflow as tf
from harness import raises

import mpi_util.compat_2017 as mpi_util
from mpi_util_spinup import mpi_tf

v1 = tf.compat.v1


class Program:
    """A graph with a network, and a session in which its variables depend on the seed."""

    def __init__(self, seed, build=lambda program: None, resource=True):
        self.graph = tf.Graph()
        with self.graph.as_default():
            v1.set_random_seed(1)
            self.x = v1.placeholder(tf.float32, (None, 3))
            draw = np.random.default_rng(seed)

            def variable(name, shape=(), dtype="float32", trainable=True):
                start = tf.constant(draw.integers(0, 50, shape).astype("i4"))
                return v1.get_variable(
                    name, initializer=tf.cast(start, dtype), trainable=trainable, use_resource=resource
                )

            self.w, self.b = variable("w", (3, 2)), variable("a/b", (2,))
            self.mean = variable("moving_mean", (2,), trainable=False)
            for dtype in ("bfloat16", "float16", "int64", "bool", "complex64"):
                variable(f"of_{dtype}", (2,), dtype, trainable=False)
            shared = tf.constant(float(seed))
            self.twins = [v1.Variable(shared, use_resource=resource) for _ in range(2)]
            self.loss = tf.reduce_mean((self.x @ self.w + self.b) ** 2)
            self.op = build(self)
            initialize = v1.global_variables_initializer()
        self.session = v1.Session(graph=self.graph, config=mpi_util.tf_config)
        self.session.run(initialize)

    def run(self, *args):
        return self.session.run(*args)

    def values(self):
        with self.graph.as_default():
            found = v1.global_variables()
        return dict(zip((v.name for v in found), self.run(found)))


def adam_step(program):
    return v1.train.AdamOptimizer(0.1).minimize(program.loss)


def once_broadcast(comm, rank, size):
    for resource in (True, False):
        mine, reference = Program(rank, adam_step, resource), Program(0, adam_step, resource)
        if rank == 0:
            mine.run(mine.op, {mine.x: np.ones((1, 3))})
        reference.run(reference.op, {reference.x: np.ones((1, 3))})
        mine.graph.finalize()
        n_operations = len(mine.graph.get_operations())
        for _ in range(1000 if size == 1 and resource else 3):
            mpi_util.rank0_bcast_wts(mine.session, mine.graph, label="test", comm=comm)
        assert len(mine.graph.get_operations()) == n_operations
        expected, found = reference.values(), mine.values()
        assert expected.keys() == found.keys() >= {"moving_mean:0", "w/Adam:0", "beta1_power:0"}
        assert all(np.array_equal(expected[name], found[name]) for name in expected)
        checksum = mpi_util.chksum(reference.session, reference.graph, "label")
        assert mpi_util.chksum(mine.session, mine.graph) == checksum == mpi_util.chksum(mine.session)


def check_an_optimizer_on_rank_0_only(comm, rank, size):
    mine, reference = Program(rank, adam_step if rank == 0 else lambda program: None), Program(0)
    mpi_util.rank0_bcast_wts(sess=mine.session, graph=mine.graph, label="policy", comm=comm)
    expected, found = reference.values(), mine.values()
    assert all(np.array_equal(expected[name], found[name]) for name in ("w:0", "a/b:0"))
    if rank == 0:
        mpi_util.set_wt(mine.session, mine.graph, mine.w, np.full((3, 2), 7.0))
        assert (mine.values()["w:0"] == 7).all()


def check_average(comm, rank, size):
    mine = Program(rank)
    everybody = [Program(k).values() for k in range(size)]
    mpi_util.all_avg_wts(mine.session, mine.graph, comm=comm)
    for name, value in mine.values().items():
        if value.dtype.kind in "ib":
            assert np.array_equal(value, everybody[0][name])
        else:
            mean = sum(one[name].astype("c16") for one in everybody) / size
            assert np.allclose(value.astype("c16"), mean, rtol=1e-2)


def check_bad_sessions(comm, rank, size):
    mine, other = Program(rank), tf.Graph()
    raises(
        mpi_util.WeightsError, "session that runs it", lambda: mpi_util.rank0_bcast_wts(mine.session, other, comm=comm)
    )
    with other.as_default():
        v1.get_variable("w", (2 + rank, 3))
    session = v1.Session(graph=other)
    raises(mpi_util.WeightsError, "initializer", lambda: mpi_util.chksum(session, other))
    if size > 1:
        raises(mpi_util.RankMismatchError, "'w'", lambda: mpi_util.rank0_bcast_wts(session, other, comm=comm))
    with other.as_default():
        v1.Variable("text")
    raises(mpi_util.WeightsError, "string", lambda: mpi_util.rank0_bcast_wts(session, other, comm=comm))


def once_sync_operations(comm, rank, size):
    for resource in (True, False):
        expected = Program(0, resource=resource).values()
        mine = Program(rank, lambda program: mpi_tf.sync_params([program.b], comm=comm), resource)
        mine.run(mine.op)
        assert np.array_equal(mine.values()["a/b:0"], expected["a/b:0"])
        assert (rank == 0) == np.array_equal(mine.values()["w:0"], expected["w:0"])
        mine = Program(rank, lambda program: mpi_tf.sync_all_params(comm=comm), resource)
        mine.run(mine.op)
        assert all(np.array_equal(value, expected[name]) for name, value in mine.values().items())
    double = Program(rank, lambda p: mpi_tf.assign_params_from_flat(2 * mpi_tf.flat_concat([p.w, p.b]), [p.w, p.b]))
    before = double.values()
    double.run(double.op)
    assert all(np.array_equal(double.values()[name], 2 * before[name]) for name in ("w:0", "a/b:0"))


def once_adam(comm, rank, size):
    def step(program):
        adam = mpi_tf.MpiAdamOptimizer(learning_rate=0.1, comm=comm)
        assert isinstance(adam, v1.train.AdamOptimizer)
        return adam.minimize(
            program.loss, var_list=[program.w, program.b, program.twins[0]]
        )  # no gradient for the last

    x = np.random.default_rng(0).normal(size=(5, size, 4, 3))  # step, rank, row
    for resource in (True, False):
        alone, mine = Program(0, adam_step, resource), Program(0, step, resource)
        if rank:
            mine.run(mine.twins[0].initializer)
        for rows in x:
            alone.run(alone.op, {alone.x: rows.reshape(-1, 3)})
            mine.run(mine.op, {mine.x: rows[rank]})
        expected, found = alone.values(), mine.values()
        assert all(np.allclose(expected[name], found[name], rtol=1e-4) for name in ("w:0", "a/b:0"))
        assert len(set(mpi_util.all_accum_batches([mpi_util.chksum(mine.session)], comm=comm))) == 1


def check_adam_where_ranks_differ(comm, rank, size):
    if size == 1:
        return

    def step(program):
        program.w = tf.stop_gradient(program.w) if rank else program.w
        loss = tf.reduce_sum(tf.matmul(program.x, program.w) + program.b)
        return mpi_tf.MpiAdamOptimizer(comm=comm).minimize(loss, var_list=v1.trainable_variables()[:2])

    mine = Program(0, step)
    raises(tf.errors.UnknownError, "RankMismatchError", lambda: mine.run(mine.op, {mine.x: np.ones((1, 3))}))
