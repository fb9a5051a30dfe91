"""TensorFlow 2: Keras models and optimizers, tf.Variable, gathered tensors, averaged gradients. Run by tf_all.py."""

import keras
import numpy as np
import tensorflow as tf
from harness import raises

import mpi_util
from mpi_util.arrays.adapters.keras import api_slot
from mpi_util_spinup import mpi_tf

DTYPES = ["bfloat16", "float16", "float32", "float64", "int8", "int32", "int64", "uint16", "bool", "complex64"]


def model(seed, already_made=0):
    """A model after that many others; its BatchNorm's statistics are those of data of that seed."""
    for _ in range(already_made):
        keras.layers.Dense(1), keras.layers.BatchNormalization(), keras.Sequential()
    keras.utils.set_random_seed(seed)
    net = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2, dtype="bfloat16"),
        ]
    )
    net(tf.random.normal((8, 3)), training=True)
    return net


def same(these, those):
    return all(np.array_equal(a, b) for a, b in zip(these, those, strict=True))


def once_keras_model(comm, rank, size):
    net, reference = model(rank, already_made=rank), model(0)
    predict = tf.function(lambda x: net(x))
    before, variables = predict(tf.ones((1, 3))), [w.value for w in net.weights]
    mpi_util.rank0_bcast_wts(net, comm=comm)
    assert same(net.get_weights(), reference.get_weights()) and len(net.non_trainable_weights) == 2
    assert all(w.value is variable for w, variable in zip(net.weights, variables))
    assert mpi_util.chksum(net) == mpi_util.chksum(reference)
    after = predict(tf.ones((1, 3)))  # as traced before
    assert np.array_equal(after, reference(tf.ones((1, 3)))) and (rank == 0) == np.array_equal(before, after)
    raises(mpi_util.WeightsError, "build", lambda: mpi_util.rank0_bcast_wts(keras.Sequential(), comm=comm))
    mpi_util.rank0_bcast_wts_keras(net := model(rank, already_made=rank), "of 2017")
    assert same(net.get_weights(), reference.get_weights())
    assert mpi_util.chksum_keras(net, f"{rank} after") == mpi_util.chksum(reference)


def check_bare_variables(comm, rank, size):
    for kind in (tf.Variable([1.0, rank]), keras.Variable(np.full(3, float(rank)))):
        for call in (mpi_util.rank0_bcast_wts, mpi_util.all_avg_wts, mpi_util.rank0_bcast_wts):
            call(kind, comm=comm)
        assert np.asarray(kind)[-1] == 0 and mpi_util.chksum(kind) == mpi_util.chksum(kind)


def once_keras_optimizer(comm, rank, size):
    def stepped(seed, already_made=0):
        for _ in range(already_made):
            keras.optimizers.Adam(name="adam")
        net, adam = model(seed, already_made), keras.optimizers.Adam(10.0**-seed)
        adam.apply([tf.fill(w.shape, float(seed + 1)) for w in net.trainable_weights], net.trainable_weights)
        return adam

    adam, reference = stepped(rank, already_made=rank), stepped(0)
    mpi_util.rank0_bcast_wts(adam, comm=comm)
    assert same([v.numpy() for v in adam.variables], [v.numpy() for v in reference.variables])
    assert float(adam.learning_rate) == 1 and float(adam.variables[2].numpy().max()) != 0
    raises(mpi_util.WeightsError, "no state", lambda: mpi_util.rank0_bcast_wts(keras.optimizers.SGD(), comm=comm))


def variables(seed):
    drawn = np.random.default_rng(seed).integers(0, 99, (len(DTYPES), 3, 2))
    return {
        dtype: [tf.Variable(tf.cast(x, dtype)), {"0-d": tf.Variable(tf.cast(seed, dtype))}]
        for dtype, x in zip(DTYPES, drawn)
    }


def check_variables_of_every_dtype(comm, rank, size):
    mine, expected = variables(rank), variables(0)
    mpi_util.rank0_bcast_wts(mine, comm=comm)
    assert mpi_util.chksum(mine) == mpi_util.chksum(expected)
    assert all(np.array_equal(mine[d][0].numpy(), expected[d][0].numpy()) for d in DTYPES)
    for _ in range(2):  # the memory in which they came is used again; they have their own
        mpi_util.rank0_bcast_wts(variables(rank + 1), comm=comm)
    assert mpi_util.chksum(mine) == mpi_util.chksum(expected)
    unknown = tf.Variable(np.zeros(2 + rank), shape=tf.TensorShape(None))
    if size > 1:
        raises(mpi_util.RankMismatchError, "'0'", lambda: mpi_util.rank0_bcast_wts([unknown], comm=comm))
    module = tf.Module()
    module.w = tf.Variable(float(rank))
    mpi_util.rank0_bcast_wts(module, comm=comm)
    assert module.w.numpy() == 0


def check_average(comm, rank, size):
    mine = {"w": tf.Variable(tf.fill((300, 4), float(rank))), "half": tf.Variable(tf.cast([rank], "bfloat16"))}
    mine["steps"] = keras.Variable(rank, dtype="int32")
    mpi_util.all_avg_wts(mine, comm=comm)
    mean = (size - 1) / 2
    assert (mine["w"].numpy() == np.float32(mean)).all() and mine["steps"].numpy() == 0
    assert mine["half"].numpy() == tf.cast(mean, "bfloat16").numpy()


def check_what_is_no_weight(comm, rank, size):
    for bad, text in ((tf.constant(1.0), "tf.Variable"), (tf.Variable("text"), "string"), ({"a": tf.ones(2)}, "'a'")):
        raises(mpi_util.WeightsError, text, lambda bad=bad: mpi_util.rank0_bcast_wts(bad, comm=comm))
    weight = tf.Variable(1.0)
    inside = tf.function(lambda: mpi_util.rank0_bcast_wts([weight], comm=comm), autograph=False)
    raises(mpi_util.WeightsError, "mpi_tf", inside)
    if size > 1:
        net = model(0) if rank else keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])
        raises(mpi_util.RankMismatchError, "(3, 5)", lambda: mpi_util.rank0_bcast_wts(net, comm=comm))


def check_a_backend_without_tensors_in_place(comm, rank, size):
    for dtype in ("bfloat16", "float32"):
        variable, block = (
            keras.Variable([1.5, 2.5], dtype=dtype),
            np.zeros(2, api_slot("w", keras.Variable(0.0, dtype=dtype)).dtype),
        )
        slot = api_slot("w", variable)
        slot.read(block)
        variable.assign([0.0, 0.0])
        slot.write(slot.to_bits(2 * slot.to_numbers(block)))
        block[:] = 0
        assert variable.numpy().tolist() == [3.0, 5.0]


def check_gathered_tensors_stay_tensors(comm, rank, size):
    def batch(k):
        made = {d: tf.cast(tf.fill((k + 1, 2), k), d) for d in DTYPES}
        return made | {
            "v": tf.Variable([float(k)]),
            "scalar": tf.constant(float(k)),
            "big": tf.fill((9000, k + 1, 2), k)[:, 0],
        }

    expected = {key: np.concatenate([np.atleast_1d(batch(k)[key]) for k in range(size)]) for key in batch(0)}
    for accumulate in (mpi_util.rank0_accum_batches, mpi_util.all_accum_batches):
        got = accumulate(batch(rank), comm=comm)
        if rank == 0 or accumulate is mpi_util.all_accum_batches:
            assert all(isinstance(leaf, tf.Tensor) and leaf.dtype == batch(0)[key].dtype for key, leaf in got.items())
            assert all(np.array_equal(leaf, expected[key]) for key, leaf in got.items())
    kept = got["big"] if rank == 0 else None
    for _ in range(3):  # the memory that a kept tensor refers to is not used again
        mpi_util.rank0_accum_batches({"big": tf.fill((9000, 2), 77)}, comm=comm)
    assert rank or np.array_equal(kept, expected["big"])
    segments = [{"x": tf.cast([rank], "bfloat16")}] if rank == size - 1 else []
    got = mpi_util.rank0_accum_batches(segments, index=[0] * len(segments), comm=comm)
    assert rank or (got["x"].dtype == tf.bfloat16 and got["x"].numpy().tolist() == [size - 1])
    for bad in (tf.constant(["text"]), tf.ragged.constant([[1], [2, 3]])):
        raises(mpi_util.BatchError, "'x'", lambda bad=bad: mpi_util.rank0_accum_batches({"x": bad}, comm=comm))


def check_reductions(comm, rank, size):
    for dtype in ("int32", "float32", "float16", "bfloat16", "complex64"):
        for shape in ((), (3,), (90, 70)):
            x = tf.cast(tf.fill(shape, rank), dtype)
            total, mean = mpi_util.all_sum(x, comm=comm), mpi_util.all_mean(x, comm=comm)
            assert total.dtype == dtype and total.shape == shape and np.all(total == tf.cast(sum(range(size)), dtype))
            assert mean.dtype == ("float64" if dtype == "int32" else dtype)
            assert np.all(mean == tf.cast((size - 1) / 2, mean.dtype))
    assert mpi_util.all_sum(tf.Variable(True), comm=comm).numpy() == size
    assert isinstance(mpi_util.all_mean(tf.Variable([1.0]), comm=comm), tf.Tensor)


def once_sync_params(comm, rank, size):
    mine, net = variables(rank), model(rank)
    leaves = [leaf for pair in mine.values() for leaf in (pair[0], pair[1]["0-d"])]
    assert mpi_tf.sync_params(leaves, comm=comm) is None
    assert mpi_util.chksum(mine) == mpi_util.chksum(variables(0))

    @tf.function
    def inside():
        mpi_tf.sync_params(net.weights, comm=comm)

    inside()
    assert same(net.get_weights(), model(0).get_weights())
    raises(mpi_util.WeightsError, "sync_params", lambda: mpi_tf.sync_all_params(comm=comm))
    a, b = tf.Variable([[1.0, 2.0]]), keras.Variable(3.0)
    flat = mpi_tf.flat_concat([a, b])
    assert flat.numpy().tolist() == [1, 2, 3] and mpi_tf.assign_params_from_flat(flat * 2, [a, b]) is None
    assert a.numpy().tolist() == [[2, 4]] and b.numpy() == 6


def once_fit(comm, rank, size):
    x = np.random.default_rng(0).normal(size=(4, size, 6, 3)).astype("f4")  # batch, rank, row
    y = x[..., :2] ** 2

    def net():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])

    def fit(optimizer, x, y):
        learner = net()
        learner.compile(optimizer, "mse")
        learner.fit(x.reshape(-1, 3), y.reshape(-1, 2), batch_size=x[0].size // 3, epochs=2, shuffle=False, verbose=0)
        return learner

    alone = fit(keras.optimizers.Adam(0.01), x, y)
    together = fit(mpi_tf.average_gradients(keras.optimizers.Adam(0.01), comm=comm), x[:, rank], y[:, rank])
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(alone.get_weights(), together.get_weights()))
    assert len(set(mpi_util.all_accum_batches([mpi_util.chksum(together)], comm=comm))) == 1
    if comm is None:
        assert keras.saving.serialize_keras_object(together.optimizer)["module"] == "keras.optimizers"
        together.compile(together.optimizer, "mse", jit_compile=True)
        raises(mpi_util.MpiUtilError, "jit_compile=False", lambda: together.fit(x[:, 0, 0], y[:, 0, 0], verbose=0))
        raises(mpi_util.MpiUtilError, "Keras optimizer", lambda: mpi_tf.average_gradients("adam"))


def two_optimizers(dtype, comm):
    """A step of two optimizers, and their variables. The first gradient comes as IndexedSlices, the last is None."""
    table, scale, idle = (tf.Variable(tf.ones(shape, dtype)) for shape in ((4, 2), 2, 1))
    of_table, of_scale = (mpi_tf.average_gradients(keras.optimizers.SGD(1.0), comm=comm) for _ in range(2))
    of_table.build([table]), of_scale.build([scale, idle])

    def step(row):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(tf.gather(table, [row]) * scale)
        of_table.apply_gradients([(tape.gradient(loss, table), table)])
        of_scale.apply(tape.gradient(loss, [scale, idle]), [scale, idle])

    return step, table, scale, idle


def once_steps_of_two_optimizers(comm, rank, size):
    expected = np.ones((4, 2))
    expected[:size] -= 1 / size
    for dtype in ("float16", "bfloat16", "float64"):
        step, table, scale, idle = two_optimizers(dtype, comm)
        (step if dtype == "float64" else tf.function(step))(tf.constant(rank))
        assert np.allclose(table.numpy().astype("f8"), expected, rtol=1e-2) and table.dtype == dtype
        assert scale.numpy().tolist() == [0, 0] and idle.numpy() == 1


def check_a_gradient_on_some_ranks_only(comm, rank, size):
    if size == 1:
        return
    a, b = tf.Variable(1.0), tf.Variable(1.0)
    sgd = mpi_tf.average_gradients(keras.optimizers.SGD(), comm=comm)
    sgd.build([a, b])
    grads = [tf.constant(1.0), None if rank == size - 1 else tf.constant(1.0)]
    raises(mpi_util.RankMismatchError, "None", lambda: sgd.apply(grads, [a, b]))
    inside = tf.function(lambda: sgd.apply(grads, [a, b]), autograph=False)
    raises(tf.errors.UnknownError, "RankMismatchError", inside)
    assert a.numpy() == 1


def check_ranks_agree_which_steps_to_skip(comm, rank, size):
    weight, inner = tf.Variable(1.0), keras.optimizers.SGD(1.0)
    scaled = mpi_tf.average_gradients(keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0), comm=comm)
    scaled.apply([tf.constant(np.inf if rank == size - 1 else 8.0)], [weight])
    assert weight == 1 and scaled.dynamic_scale == 4
    scaled.apply([tf.constant(4.0 * rank)], [weight])
    assert weight == 1 - (size - 1) / 2
