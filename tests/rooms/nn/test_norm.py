"""The norm of a stream: its kernel for TPU has the gradient of the formula, and runs where it can."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.host import host_params
from support.reference import relative_difference, train

import shardopt as so
from benchmarks import transformer
from shardopt.kernels import _norm as kernels
from shardopt.mesh import under_mesh
from shardopt.models import moe
from shardopt.nn import _norm
from shardopt.planning import Transformer

ON_TPU = "gradient_of_norm"


@pytest.fixture
def on_tpu(monkeypatch):
    """Let norms use their kernel; it runs interpreted, since jax's devices are not TPUs."""
    monkeypatch.setattr(kernels, "device_kind_or_default", lambda: "TPU v6 lite")


def draw(dtype, *shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(jnp.float32, 2e-6), (jnp.bfloat16, 2**-8)],
    ids=["float32", "bfloat16"],
)
def test_the_kernel_adds_the_gradient_of_the_stream(dtype, tolerance, monkeypatch):
    """Rows of several blocks, and a vector of zeros."""
    x, scale, *grads = draw(dtype, (2, 256, 128), (128,), *[(2, 256, 128)] * 2)
    x = x.at[1, 3].set(0)
    monkeypatch.setattr(kernels, "_block", lambda x: 64)

    def gradients(x, scale, grad, norm_grad):
        _, pull = jax.vjp(lambda x, scale: (x, _norm.rms_norm(x, scale, 1e-2)), x, scale)
        return pull((grad, norm_grad))

    wide = jax.jit(gradients)(*(array.astype(jnp.float32) for array in (x, scale, *grads)))
    by_kernel = jax.jit(lambda x, scale, *grads: kernels.gradient_of_norm(x, scale, 1e-2, *grads))
    kernel_grads = by_kernel(x, scale, *grads)
    assert kernel_grads[0].dtype == kernel_grads[1].dtype == dtype
    for a, b in zip(kernel_grads, wide, strict=True):
        assert relative_difference(a.astype(jnp.float32), b) < tolerance


def stream(x, scale, **options):
    """Return a sum that counts the stream and its norm differently."""
    x, normed = _norm.norm_of_stream(x, scale, 1e-5, **options)
    return jnp.sum(jnp.sin(x)) + jnp.sum(jnp.cos(2 * normed))


@pytest.mark.parametrize("plus_one", [False, True], ids=["factor", "factor less one"])
def test_with_the_kernel_it_is_the_same_function(plus_one, on_tpu, monkeypatch):
    x, scale = draw(jnp.float32, (2, 128, 128), (128,))
    run = functools.partial(stream, plus_one=plus_one)

    def value_and_grad(*args):
        return jax.value_and_grad(run, argnums=(0, 1))(*args)

    assert ON_TPU in str(jax.make_jaxpr(value_and_grad)(x, scale))
    with_kernel = jax.jit(value_and_grad)(x, scale)
    monkeypatch.undo()
    assert (
        relative_difference(with_kernel, jax.jit(jax.value_and_grad(run, argnums=(0, 1)))(x, scale))
        < 1e-5
    )


@pytest.mark.fast
def test_a_factor_less_one_is_added_and_multiplied_in_float32(on_tpu):
    """It is rounded once, as in Gemma. Its gradient has its own dtype."""
    x, weight = draw(jnp.bfloat16, (1, 128, 128), (128,))

    @jax.jit
    def norms(x, weight):
        wide = x.astype(jnp.float32)
        exact = _norm.rms_norm(wide, 1 + weight.astype(jnp.float32), 1e-5).astype(jnp.bfloat16)
        _, by_kernel = _norm.norm_of_stream(x, weight, 1e-5, plus_one=True)
        # a barrier, or the compiler would leave out the first rounding
        rounded = jax.lax.optimization_barrier(1 + weight)
        return (
            exact,
            [by_kernel, _norm.rms_norm_plus_one(x, weight, 1e-5)],
            _norm.rms_norm(x, rounded, 1e-5),
        )

    exact, outputs, rounded_twice = jax.device_get(norms(x, weight))
    for output in outputs:
        assert output.dtype == jnp.bfloat16
        assert np.mean(output == exact) > 0.99
    assert np.mean(rounded_twice == exact) < 0.9
    gradient = jax.grad(lambda weight: stream(x, weight, plus_one=True))
    assert jax.eval_shape(gradient, weight).dtype == jnp.bfloat16


def test_a_batch_of_scales_adds_the_gradient_of_the_stream_once(on_tpu, monkeypatch):
    x, scales = draw(jnp.float32, (1, 128, 128), (3, 128))

    def gradient(*args):
        return jax.grad(lambda x, scales: jnp.sum(jax.vmap(stream, (None, 0))(x, scales)))(*args)

    assert ON_TPU in str(jax.make_jaxpr(gradient)(x, scales))
    with_kernel = jax.jit(gradient)(x, scales)
    monkeypatch.undo()
    plain_loss = lambda x, scales: jnp.sum(jax.vmap(stream, (None, 0))(x, scales))  # noqa: E731
    plain = jax.jit(jax.grad(plain_loss))(x, scales)
    assert relative_difference(with_kernel, plain) < 1e-5


@pytest.mark.fast
def test_the_kernel_takes_whole_rows_in_multiples_of_128(on_tpu, mesh_of):
    def is_taken(*shape, dtype=jnp.bfloat16, run=stream):
        operands = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[-1:], dtype)
        return ON_TPU in str(jax.make_jaxpr(jax.grad(run))(*operands))

    assert is_taken(1, 128, 256)
    assert not is_taken(1, 64, 256)
    assert not is_taken(1, 128, 192)
    assert not is_taken(128, 256)
    assert not is_taken(1, 128, 2**17)  # 32 rows do not fit
    mesh = mesh_of(data=2, tensor=2)
    with under_mesh(mesh):
        assert not is_taken(2, 128, 256)  # jax would refuse to partition a kernel
        each = functools.partial(
            jax.shard_map, in_specs=(P("data"), P()), out_specs=P(), check_vma=False
        )
        assert is_taken(2, 128, 256, run=each(stream, axis_names=set(mesh.axis_names)))
        assert not is_taken(2, 128, 256, run=each(stream, axis_names={"data"}))


def test_what_remat_saves_is_not_computed_again(on_tpu):
    """The inverse of the root mean square has the name that is given to the norm."""

    def inverses(names):
        def norm(x, scale):
            return jnp.sum(jnp.sin(_norm.norm_of_stream(x, scale, 1e-5, name="products")[1]))

        norm = jax.checkpoint(norm, policy=jax.checkpoint_policies.save_only_these_names(*names))
        return str(jax.make_jaxpr(jax.grad(norm))(jnp.ones((1, 128, 128)), jnp.ones(128))).count(
            "name=inverse_rms"
        )

    assert inverses(["products"]) == inverses([]) - 1 == 1


def test_experts_name_the_statistics_like_a_product_that_they_have(on_tpu):
    """Otherwise remat would take a name on TPU that it refuses elsewhere."""
    config = moe.config(vocab_size=8, dim=128, num_layers=1, num_heads=1, num_experts=2, hidden=8)
    batch = {"tokens": jnp.zeros((1, 129), jnp.int32)}

    def loss(params):
        return moe.model(config).loss_fn(params, batch)

    text = str(jax.make_jaxpr(loss)(jax.eval_shape(lambda: moe.init(config, jax.random.key(0)))))
    assert "name=inverse_rms" in text
    assert "name=router" in text
    assert "name=mlp_hidden" not in text


@pytest.mark.parametrize("length", [256, 128])
def test_shards_of_positions_have_the_kernel(length, on_tpu, mesh_of):
    """If tensor alone is automatic, each device norms its own positions, if they are a multiple of
    128.
    """
    x, scale = draw(jnp.float32, (2, length, 128), (128,))
    plain = jax.value_and_grad(stream, argnums=(0, 1))

    def sharded(x, scale):
        x = jax.lax.with_sharding_constraint(x, P(None, "tensor"))
        return stream(x, scale, has_sharded_positions=True)

    mesh = mesh_of(data=2, tensor=2)
    each = jax.shard_map(
        lambda x, scale: jax.lax.psum(sharded(x, scale), "data"),
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P(),
        axis_names={"data"},
        check_vma=False,
    )
    with_kernel = jax.value_and_grad(each, argnums=(0, 1))
    with jax.set_mesh(mesh):
        assert (ON_TPU in str(jax.make_jaxpr(with_kernel)(x, scale))) == (length == 256)
        kernel_output = jax.jit(with_kernel)(x, scale)
    with under_mesh(mesh):  # the kernel does not take arrays that are not local
        expected = jax.jit(plain)(x, scale)
    assert relative_difference(kernel_output, expected) < 1e-5


def test_steps_with_the_kernel_are_those_of_one_device_without_it(monkeypatch, mesh_of):
    shape = Transformer("t", 128, 2, 1, 128, 32, 128, dtype=jnp.float32)
    rng = np.random.default_rng(0)
    batches = [
        {name: rng.integers(0, 32, (4, 128)) for name in ("tokens", "targets")} for _ in range(2)
    ]
    params = host_params(transformer.init, shape)
    tx = optax.sgd(0.5, momentum=0.9)
    model = transformer.model(shape, remat="full")

    def mean_loss(params, batch):
        loss = model.loss_fn(params, batch)
        return loss.total / loss.weight

    expected = train(tx, mean_loss, params, batches)[1]
    monkeypatch.setattr(kernels, "device_kind_or_default", lambda: "TPU v6 lite")
    opt = so.fsdp(tx, mesh_of(data=4), model)
    state = opt.init(params)
    for batch in batches:
        state, _ = opt.step(state, batch)
    assert relative_difference(state.params, expected) < 1e-5
    assert ON_TPU in str(
        jax.make_jaxpr(jax.grad(lambda params: mean_loss(params, batches[0])))(params)
    )
