"""Inputs that are easy to forget: each was wrong once, or would be without a line of its own."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so
from shardopt.hlo import memory

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
PARAMS = {"w": np.full((8, 8), 0.5, np.float32), "b": np.zeros(8, np.float32)}


def square(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"][None, :]) ** 2)


@pytest.mark.parametrize("strategy", tiered(STRATEGIES, lambda name: name in ("zero1", "fsdp")))
def test_complex_leaves_are_trained(strategy, mesh_of):
    def loss_fn(params, batch):
        return jnp.mean(jnp.abs(batch @ params["c"]) ** 2)

    params = {"c": np.full((8, 8), 0.5 + 0.25j, np.complex64)}
    opt = STRATEGIES[strategy](optax.sgd(0.1), mesh_of(data=4), loss_fn)
    state, metrics = opt.step(opt.init(params), X)
    grads = jax.device_get(jax.jit(jax.grad(loss_fn))(params, X))
    np.testing.assert_allclose(state.params["c"], params["c"] - 0.1 * grads["c"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(grads["c"]), rtol=1e-5)


HALVES = [(jnp.float16, 2e-3), (jnp.bfloat16, 2e-2)]


@pytest.mark.parametrize(
    ("strategy", "dtype", "tolerance", "micro_batches"),
    tiered(
        [(name, *half, count) for name in STRATEGIES for half in HALVES for count in (1, 2)],
        lambda row: (
            (row[0], row[1], row[3])
            in (("zero2", jnp.float16, 2), ("fsdp", jnp.float16, 2), ("ddp", jnp.bfloat16, 1))
        ),
        ids=str,
    ),
)
def test_large_weights_do_not_spoil_half_precision_gradients(
    strategy, micro_batches, dtype, tolerance, mesh_of
):
    """A total weight of 80,000 is beyond fp16, and 257 beyond the 8 bits of bf16."""

    def loss_fn(params, batch):
        per_row = ((batch @ params["w"].astype(jnp.float32)) ** 2).mean(-1)
        return so.losses.Weighted((per_row * 5000.0).sum(), jnp.float32(5000.0 * per_row.size))

    params = {"w": jnp.eye(8, dtype=dtype)}
    opt = STRATEGIES[strategy](
        optax.sgd(0.0), mesh_of(data=4), loss_fn, micro_batches=micro_batches
    )
    _, metrics = opt.step(opt.init(params), X)
    mean = jax.grad(lambda w: jnp.mean((X @ w) ** 2))(jnp.eye(8))
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(mean), rtol=tolerance)


def test_running_statistics_move_although_gathers_are_narrow(mesh_of):
    def loss_fn(params, batch):
        moved = 0.9995 * params["mean"] + 0.0005 * 10.0
        return square(params, batch.astype(jnp.bfloat16)), {"m": so.losses.Updated({"mean": moved})}

    opt = so.fsdp(
        optax.sgd(0.0),
        mesh_of(data=2),
        loss_fn,
        rules=[("mean", "frozen")],
        gather_dtype=jnp.bfloat16,
    )
    state = opt.init({**PARAMS, "mean": jnp.ones((4,))})
    for _ in range(20):
        state, _ = opt.step(state, X)
    np.testing.assert_allclose(state.params["mean"], 10 - 9 * 0.9995**20, rtol=1e-5)


@pytest.mark.parametrize(
    "names", tiered([["ddp", "fsdp"], [*STRATEGIES]], lambda names: len(names) == 2, ids="-".join)
)
def test_every_strategy_draws_the_same_numbers(names, mesh_of):
    model = so.BlockModel(
        embed=lambda outer, batch: batch,
        block=lambda w, x, rng: x * jax.random.bernoulli(rng, 0.5, x.shape) @ w["w"],
        loss=lambda outer, x, batch: jnp.mean(x**2),
    )
    params = {"blocks": {"w": jnp.stack([jnp.eye(8)] * 2)}}
    losses = set()
    for name in names:
        opt = STRATEGIES[name](optax.sgd(0.1), mesh_of(data=4), model)
        _, metrics = opt.step(opt.init(params, jax.random.key(3)), X)
        losses.add(round(float(metrics["loss"]), 5))
    assert len(losses) == 1


def test_fsdp_without_blocks_does_not_keep_the_model_through_micro_batches(mesh_of):
    params = {f"w{i}": jax.ShapeDtypeStruct((256, 256), jnp.float32) for i in range(8)}

    def loss_fn(params, batch):
        for w in params.values():
            batch = jnp.tanh(batch @ w)
        return jnp.mean(batch**2)

    def temporary(make):
        opt = make(optax.sgd(0.1), mesh_of(data=8), loss_fn, micro_batches=4)
        batch = jax.ShapeDtypeStruct((32, 256), jnp.float32)
        return memory(opt.step.lower(opt.abstract_state(params), batch).compile()).temporary

    psi = 8 * 256 * 256 * 4
    assert temporary(so.fsdp) < 1.3 * psi < 1.9 * psi < temporary(so.ddp)


def test_iterators_of_patterns_are_not_used_up_by_the_check(mesh_of):
    opt = so.ddp(
        optax.sgd(0.1), mesh_of(data=2), square, rules=(rule for rule in [("^b$", "frozen")])
    )
    state, _ = opt.step(opt.init(PARAMS), X)
    np.testing.assert_array_equal(state.params["b"], PARAMS["b"])
    assert not np.allclose(state.params["w"], PARAMS["w"])


def test_numpy_doubles_are_promised_as_they_are_stored(mesh_of):
    opt = so.fsdp(optax.adam(0.1), mesh_of(data=4), square, min_shard_elements=1)
    state = opt.init({"w": np.ones((8, 8)), "b": np.ones((8,))})
    promised = opt.abstract_state()
    chex.assert_trees_all_equal_shapes_and_dtypes(state, promised)
    assert opt.config.report().params_bytes == (64 + 8) * 4 // 4


def test_a_weakly_typed_parameter_does_not_compile_the_step_twice(mesh_of, monkeypatch):
    opt = so.ddp(
        optax.sgd(0.1), mesh_of(data=2), lambda params, batch: jnp.mean(batch) * params["scale"]
    )
    for state in (
        opt.init({"scale": 2.0}),
        opt.init(lambda rng: {"scale": 2.0}, jax.random.key(0)),
    ):
        state, _ = opt.step(state, X)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                jax._src.compiler,
                "compile_or_get_cached",
                lambda *_, **__: pytest.fail("compiled again"),
            )
            opt.step(state, X)


def test_steps_can_be_traced_into_a_larger_program(mesh_of):
    opt = so.fsdp(optax.sgd(0.1, momentum=0.9), mesh_of(data=4), square, min_shard_elements=1)
    plain = opt.init(PARAMS)
    for _ in range(3):
        plain, metrics = opt.step(plain, X)
    many = jax.jit(lambda state, batches: jax.lax.scan(opt.step, state, batches))
    scanned, history = many(opt.init(PARAMS), np.stack([X] * 3))
    chex.assert_trees_all_close(jax.device_get(scanned), jax.device_get(plain), rtol=1e-6)
    np.testing.assert_allclose(history["loss"][-1], metrics["loss"], rtol=1e-6)


def test_a_mesh_set_for_the_whole_program_does_no_harm(mesh_of):
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        opt = so.fsdp(optax.sgd(0.1), mesh, square, min_shard_elements=1)
        _, metrics = opt.step(opt.init(PARAMS), X)
    np.testing.assert_allclose(metrics["loss"], square(PARAMS, X), rtol=1e-6)


def test_a_users_remat_policy_never_keeps_gathered_weights(mesh_of):
    def temporary(remat):
        model = so.BlockModel(
            embed=lambda outer, batch: batch,
            block=lambda w, x: jnp.tanh(x @ w["w"]),
            loss=lambda outer, x, batch: jnp.mean(x**2),
            remat=remat,
        )
        opt = so.fsdp(optax.sgd(0.1), mesh_of(data=8), model)
        state = opt.abstract_state(
            {"blocks": {"w": jax.ShapeDtypeStruct((8, 128, 128), jnp.float32)}}
        )
        batch = jax.ShapeDtypeStruct((8, 128), jnp.float32)
        return memory(opt.step.lower(state, batch).compile()).temporary

    everything = temporary(jax.checkpoint_policies.everything_saveable)
    assert everything <= temporary(None) < 8 * 128 * 128 * 4


def test_a_kernel_that_wants_every_axis_manual_has_a_way(mesh_of):
    """Callbacks and Pallas kernels refuse axes that are left to the partitioner, as tensor is."""

    def host_double(x):
        return jax.pure_callback(
            lambda x: 2 * np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x
        )

    def loss_fn(params, batch):
        spec = jax.sharding.PartitionSpec()
        double = jax.shard_map(
            host_double, in_specs=spec, out_specs=spec, axis_names={"tensor"}, check_vma=False
        )
        return square(params, jax.lax.stop_gradient(double(batch)))

    # no proof looks into a callback
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), loss_fn, view="unproved")
    _, metrics = opt.step(opt.init(PARAMS), X)
    np.testing.assert_allclose(metrics["loss"], square(PARAMS, 2 * X), rtol=1e-6)


def test_a_key_that_is_bound_already_is_left_alone(mesh_of):
    seen = []

    def loss_fn(params, batch, rng=None):
        seen.append(rng)
        return square(params, batch)

    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), functools.partial(loss_fn, rng="mine"))
    opt.step(opt.init(PARAMS), X)
    assert set(seen) == {"mine"}


def test_line_searches_see_the_loss_that_was_differentiated(mesh_of):
    def loss_fn(params, batch, rng):
        return square(params, batch) * (1 + jax.random.uniform(rng))

    value_pairs = []

    def update(updates, state, params=None, *, value, value_fn, **_):
        jax.debug.callback(
            lambda a, b: value_pairs.append((float(a), float(b))), value, value_fn(params)
        )
        return updates, state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    opt = so.zero(tx, mesh_of(data=2), loss_fn, micro_batches=2)
    opt.step(opt.init(PARAMS), X)
    jax.effects_barrier()
    assert value_pairs
    np.testing.assert_allclose([a for a, _ in value_pairs], [b for _, b in value_pairs], rtol=1e-6)


REFUSED = [
    (
        lambda opt: opt.step(None, X),
        TypeError,
        (
            "ddp: the state must be the TrainState that init or step returned, got NoneType.\n"
            "Fix: call step(state, batch) with state = opt.init(params)."
        ),
    ),
    (
        lambda opt: opt.init(PARAMS, 0),
        TypeError,
        "ddp: rng must be a random key, got int.\nFix: pass jax.random.key(seed).",
    ),
    (
        lambda opt: opt.init(jax.eval_shape(lambda: PARAMS)),
        TypeError,
        (
            "ddp: init was given shapes without values.\nFix: pass arrays, or a function and a key:"
            " init(init_fn, rng)."
        ),
    ),
    (
        lambda opt: opt.specs(opt.init(PARAMS)),
        TypeError,
        (
            "ddp: parameters were expected, got a TrainState.\nFix: pass its .params;"
            " so.replace(state, opt_state=..., step=...) sets what else it has."
        ),
    ),
    (
        lambda opt: opt.init({"a/b": jnp.ones(()), "a": {"b": jnp.ones(())}}),
        ValueError,
        (
            "ddp: 1 key path written alike belong to several leaves.\n  a/b\n"
            "Fix: rename a key; '/' in a key reads as nesting."
        ),
    ),
]


@pytest.mark.parametrize(("act", "error", "message"), REFUSED)
def test_bad_input_is_refused(act, error, message, mesh_of):
    with pytest.raises(error) as caught:
        act(so.ddp(optax.sgd(0.1), mesh_of(data=2), square))
    assert str(caught.value) == message


def test_a_state_that_was_used_up_is_refused(mesh_of):
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), square)
    state = opt.init(PARAMS)
    opt.step(state, X)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        opt.step(state, X)
    assert (
        str(caught.value)
        == "ddp: this state was given to step already, which takes over its memory.\n"
        "Fix: go on with the state that step returned."
    )


def test_a_state_of_another_strategy_is_refused(mesh_of):
    zero = so.zero(optax.adam(0.1), mesh_of(data=4), square, min_shard_elements=1)
    fsdp = so.fsdp(optax.adam(0.1), mesh_of(data=4), square, min_shard_elements=1)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        fsdp.step(zero.init(PARAMS), X)
    lines = str(caught.value).splitlines()
    assert lines[0] == "fsdp: the state does not live where this strategy keeps it (2 leaves)."
    assert lines[1].startswith("  params/b: placed as ")
    assert (
        lines[-1] == "Fix: move a state between strategies and meshes with so.save and so.restore."
    )
    with pytest.raises(ValueError, match="its structure differs"):
        so.fsdp(optax.sgd(0.1), mesh_of(data=4), square, min_shard_elements=1).step(
            fsdp.init(PARAMS), X
        )


def test_blocks_must_be_stacked(mesh_of):
    model = so.BlockModel(lambda o, b: b, lambda w, x: x @ w["w"], lambda o, x, b: x.mean())
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=2), model)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        opt.init({"blocks": {"w": jnp.ones((3, 8, 8)), "b": jnp.ones((2, 8))}})
    assert (
        str(caught.value)
        == "fsdp: the leaves of 'blocks' must be stacked along a first dim of one length.\n"
        "  blocks/b: shape (2, 8)\n  blocks/w: shape (3, 8, 8)\n"
        'Fix: pass {"blocks": leaves stacked [L, ...], **outer}; '
        "jax.tree.map(lambda *x: jnp.stack(x), *blocks) stacks."
    )
    with pytest.raises(ValueError, match="must be a dict with 'blocks'"):
        opt.init({"layers": jnp.ones((3, 8, 8))})
    for remat in ("dots", "save:", "save:a,,b", 3):
        with pytest.raises(
            ValueError, match=rf"BlockModel\.remat must be None, .*, got {remat!r}\."
        ):
            so.fsdp(optax.sgd(0.1), mesh_of(data=2), model._replace(remat=remat))


def test_a_loss_that_cannot_do_without_a_key_says_so_when_evaluated(mesh_of):
    def loss_fn(params, batch, *, rng):
        return square(params, batch) * jax.random.uniform(rng)

    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), loss_fn)
    with pytest.raises(TypeError) as caught:
        opt.evaluate(opt.init(PARAMS), X)
    assert (
        str(caught.value)
        == "loss_fn: there is no random key to give outside of training.\nFix: give rng the default"
        " None."
    )


@pytest.mark.parametrize("view", tiered(["auto", "global"], lambda view: view == "auto"))
@pytest.mark.parametrize(
    "constant", tiered(["number", "array", "integer"], lambda x: x == "number")
)
def test_a_loss_may_close_over_a_value_that_the_user_traces(constant, view, mesh_of):
    """The proof reads constants of a loss, and a tracer has no numbers."""
    values = {"number": jnp.float32(2), "array": jnp.full((8, 8), 2.0), "integer": jnp.int32(2)}
    mesh = mesh_of(data=4)
    value = values[constant]
    state = so.fsdp(optax.sgd(0.1), mesh, square).init(PARAMS)

    @jax.jit
    def loss_at(value, state):
        def scaled(params, batch):
            return square({**params, "w": params["w"] * value}, batch)

        return so.fsdp(optax.sgd(0.1), mesh, scaled, view=view).step(state, X)[1]["loss"]

    expected = jax.jit(square)({**PARAMS, "w": PARAMS["w"] * 2}, X)
    np.testing.assert_allclose(loss_at(value, state), expected, rtol=1e-5)


def test_a_loss_without_a_tracer_is_a_loss(mesh_of):
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=4), lambda params, batch: 3.0)
    _, metrics = opt.step(opt.init(PARAMS), X)
    assert (metrics["loss"], metrics["grad_norm"]) == (3, 0)


TRANSFORMATIONS = {
    "grad": lambda f: jax.grad(f)(2.0),
    "vmap": lambda f: jax.vmap(f)(jnp.array([1.0, 2.0])),
    "jvp": lambda f: jax.jvp(f, (2.0,), (1.0,)),
    "jacfwd": lambda f: jax.jacfwd(f)(2.0),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f))(jnp.array([1.0, 2.0])),
}


# a step within vmap cannot use the memory of its state
@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("strategy", tiered(STRATEGIES, lambda name: name == "fsdp"))
@pytest.mark.parametrize("name", ["grad", "vmap", "vmap of grad"])
def test_a_step_within_a_transformation_without_jit_is_that_of_one_device(name, strategy, mesh_of):
    """A sweep by `vmap`, a gradient by a hyperparameter: the loss closes over a tracer."""

    def after_a_step(value):
        def scaled(params, batch):
            return square({**params, "w": params["w"] * value}, batch)

        opt = STRATEGIES[strategy](optax.sgd(0.1), mesh_of(data=4), scaled)
        state, metrics = opt.step(opt.init(PARAMS), X)
        return metrics["loss"] + (state.params["w"] ** 2).sum() + opt.evaluate(state, X)["loss"]

    def on_one_device(value):
        def scaled(params):
            return square({**params, "w": params["w"] * value}, X)

        loss, grads = jax.value_and_grad(scaled)(PARAMS)
        params = jax.tree.map(lambda param, grad: param - 0.1 * grad, PARAMS, grads)
        return loss + (params["w"] ** 2).sum() + scaled(params)

    transform = TRANSFORMATIONS[name]
    expected = jax.jit(lambda: transform(on_one_device))()
    chex.assert_trees_all_close(transform(after_a_step), expected, rtol=1e-4)


@pytest.mark.parametrize("name", tiered(TRANSFORMATIONS, lambda name: name == "grad"))
def test_a_step_that_a_transformation_does_not_touch_runs_as_it_is(name, mesh_of):
    opt = so.zero(optax.adam(0.1), mesh_of(data=4), square)
    expected = opt.step(opt.init(PARAMS), X)[1]["loss"]

    def product(value):
        scaled = so.fsdp(optax.sgd(0.1), opt.config.home.mesh, lambda p, b: square(p, b) * value)
        loss = opt.step(opt.init(PARAMS), X)[1]["loss"]
        return loss * scaled.evaluate(scaled.init(PARAMS), X)["loss"]

    transform = TRANSFORMATIONS[name]
    expected_product = transform(lambda value: expected * square(PARAMS, X) * value)
    chex.assert_trees_all_close(transform(product), expected_product, rtol=1e-5)


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        (np.float32(0), np.complex64(1 + 2j)),
        (np.int32(0), np.float32(0.7)),
        (np.int32(0), np.float32(np.nan)),
        (np.bool_(False), np.int32(2)),
        (jax.random.key(0), jax.random.key(0, impl="rbg")),
        (jax.random.key(0), np.uint32(3)),
    ],
)
def test_an_updated_value_that_a_cast_would_change_is_refused(parameter, value, mesh_of):
    def loss_fn(params, batch):
        return square(params, batch), {"new": so.losses.Updated({"c": jnp.asarray(value)})}

    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=2), loss_fn, rules=[("^c$", "frozen")])
    state = opt.init({**PARAMS, "c": parameter})
    with pytest.raises(
        ValueError, match=r"so\.losses\.Updated does not fit .*\n  c: .*, the param"
    ):
        opt.step(state, X)


@pytest.mark.parametrize("rows", tiered([3, 13, 15], lambda rows: rows == 13))
@pytest.mark.parametrize("strategy", tiered(STRATEGIES, lambda name: name == "fsdp"))
def test_the_global_view_takes_rows_that_the_devices_do_not_divide(strategy, rows, mesh_of):
    batch = {"x": X[:rows], "weights": np.arange(1.0, rows + 1, dtype=np.float32)}

    def loss_fn(params, batch):
        per_row = ((batch["x"] @ params["w"]) ** 2).mean(-1)
        return (per_row * batch["weights"]).sum() / batch["weights"].sum()

    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(PARAMS, batch)
    opt = STRATEGIES[strategy](optax.sgd(0.1), mesh_of(data=4), loss_fn, view="global")
    state = opt.init(PARAMS)
    with pytest.warns(UserWarning, match="a global batch") as warned:
        state, metrics = opt.step(state, batch)
    sizes = {3: "4", 13: "12 or 16", 15: "12 or 16"}[rows]
    assert [str(warning.message) for warning in warned] == [
        f"{opt.config.strategy}: a global batch of {rows} is not divisible by 4 devices along data ="
        " 4.\n  The whole batch runs at once, and devices repeat work on rows. The step is exact.\n"
        f"Fix: use a batch of {sizes}."
    ]
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], PARAMS["w"] - 0.1 * grads["w"], rtol=1e-5)


MIXING = {
    "contrastive": lambda scores: jnp.mean(jax.nn.logsumexp(scores @ scores.T, axis=1)),
    "product": lambda scores: scores.mean() * (scores**2).mean(),
    "ranks": lambda scores: (jnp.sort(scores, axis=0) * jnp.arange(len(scores))[:, None]).mean(),
}


@pytest.mark.parametrize("rows", tiered([3, 14], lambda rows: rows == 14))
@pytest.mark.parametrize("options", tiered([{}, {"micro_batches": 2}], lambda options: not options))
@pytest.mark.parametrize("name", tiered(MIXING, lambda name: name == "contrastive"))
def test_rows_that_devices_do_not_divide_are_taken_where_the_loss_mixes_rows_anyway(
    name, options, rows, mesh_of
):
    def loss_fn(params, batch):
        return MIXING[name](batch @ params["w"])

    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(PARAMS, X[:rows])
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=4), loss_fn, **options)
    with (
        pytest.warns(UserWarning, match="The whole batch runs at once"),
        pytest.warns(UserWarning, match="the loss runs in the global view"),
    ):
        state, metrics = opt.step(opt.init(PARAMS), X[:rows])
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(state.params["w"], PARAMS["w"] - 0.1 * grads["w"], rtol=1e-4)
