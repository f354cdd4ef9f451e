"""The kernel that rotates heads on TPU: its numbers, its gradient, and where it runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.reference import relative_difference

from shardopt.kernels import _rotary
from shardopt.mesh import under_mesh
from shardopt.models import _decoder_block as decoder_block
from shardopt.models._decoder_block import BlockStream
from shardopt.models._decoder_config import DecoderConfig
from shardopt.nn._rotary import rotate_by
from shardopt.trace._jaxprs import equations

FREQUENCIES = 1e-2 ** (np.arange(64) / 64)


@pytest.fixture
def on_tpu(monkeypatch):
    """Let rotations use their kernel; it runs interpreted, since jax's devices are not TPUs."""
    monkeypatch.setattr(_rotary, "device_kind_or_default", lambda: "TPU v6 lite")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("dtype", "tolerance", "per_row"),
    [(jnp.float32, 1e-6, False), (jnp.bfloat16, 2**-8, True)],
    ids=["float32, positions", "bfloat16, positions of each row"],
)
def test_the_kernel_rotates_as_the_formula_and_back(dtype, tolerance, per_row, on_tpu):
    """Two rows of three heads are in two blocks of positions. numpy computes the expected numbers,
    in complex numbers.
    """
    rng = np.random.default_rng(0)
    x, grad = (rng.normal(size=(2, 512, 3, 128)).astype(dtype) for _ in range(2))
    positions = rng.integers(0, 99, (2, 512)) if per_row else np.arange(512)

    def rotate(x):
        return rotate_by(x, jnp.asarray(positions), jnp.asarray(FREQUENCIES, jnp.float32), 1.25)

    assert "rotate_halves" in str(jax.make_jaxpr(rotate)(x))

    @jax.jit
    def with_gradient(x, grad):
        rotated, pull = jax.vjp(rotate, x)
        return rotated, pull(grad)[0]

    rotated, gradient = jax.device_get(with_gradient(x, grad))
    turns = 1.25 * np.exp(1j * np.broadcast_to(positions, (2, 512))[..., None, None] * FREQUENCIES)

    def turned(x, turns):
        halves = np.asarray(x, np.float64)
        halves = (halves[..., :64] + 1j * halves[..., 64:]) * turns
        return np.concatenate([halves.real, halves.imag], axis=-1)

    assert rotated.dtype == dtype
    tolerance = max(tolerance, 2e-5)
    assert relative_difference(rotated.astype(np.float32), turned(x, turns)) < tolerance
    expected_gradient = turned(grad, turns.conj())
    assert relative_difference(gradient.astype(np.float32), expected_gradient) < tolerance


@pytest.mark.fast
def test_the_kernel_takes_whole_heads_in_multiples_of_128(on_tpu, mesh_of):
    def is_taken(*shape):
        return _rotary.takes_rotation(jax.ShapeDtypeStruct(shape, jnp.bfloat16))

    assert is_taken(1, 128, 3, 128)
    assert is_taken(1, 128, 3, 256)
    assert not is_taken(1, 64, 3, 128)
    assert not is_taken(1, 128, 3, 64)
    assert not is_taken(1, 128, 2**11, 256)  # 32 positions do not fit
    with under_mesh(mesh_of(data=2)):
        assert not is_taken(2, 128, 3, 128)
    with under_mesh(mesh_of(tensor=2)):  # which shards heads
        assert is_taken(2, 128, 4, 128)
        assert not is_taken(2, 128, 3, 128)
    with under_mesh(jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Explicit,))):
        assert not is_taken(2, 128, 4, 128)


def test_heads_that_tensor_shards_have_the_kernel(on_tpu, monkeypatch, mesh_of):
    rng = np.random.default_rng(0)
    x, grad = (jnp.asarray(rng.normal(size=(2, 128, 4, 128)), jnp.float32) for _ in range(2))
    mesh = mesh_of(tensor=2)

    def both(x, grad):
        x = jax.lax.with_sharding_constraint(
            x, NamedSharding(mesh, PartitionSpec(None, None, "tensor"))
        )

        def rotate(x):
            return rotate_by(x, jnp.arange(128), jnp.asarray(FREQUENCIES, jnp.float32), 1.25)

        rotated, pull = jax.vjp(rotate, x)
        return rotated, pull(grad)[0]

    with jax.set_mesh(mesh):
        assert "rotate_halves" in str(jax.make_jaxpr(both)(x, grad))
        by_kernel = jax.jit(both)(x, grad)
        monkeypatch.undo()
        assert relative_difference(by_kernel, jax.jit(lambda *args: both(*args))(x, grad)) < 1e-6


def test_a_block_rotates_and_scales_its_queries_in_one_pass(on_tpu, monkeypatch):
    """With heads kept before the kernel, and a factor of scores of its own, the block and its
    gradient are the same.
    """
    config = DecoderConfig(
        32, 256, 1, 2, hidden=32, activation="gelu", gated=False, attention_scale=0.2
    )
    rng = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda size: jnp.asarray(rng.normal(size=size) / 16, jnp.float32),
        decoder_block.block_shapes(config, dense=True),
        is_leaf=lambda size: isinstance(size, tuple),
    )
    x = jnp.asarray(rng.normal(size=(1, 128, 256)), jnp.float32)

    def loss(weights, x):
        def run(x):
            return decoder_block.apply_block(
                config, weights, BlockStream(x, None, None, None, None)
            ).x

        return jnp.sum(
            jnp.sin(
                jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names("qkv"))(x)
            )
        )

    jaxpr = jax.make_jaxpr(lambda *args: jax.value_and_grad(loss)(*args))(weights, x)
    kernels = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "pallas_call"]
    assert len(kernels) == 6  # queries and keys: forward, again, and back
    with_kernel = jax.jit(lambda *args: jax.value_and_grad(loss)(*args))(weights, x)
    monkeypatch.undo()
    assert (
        relative_difference(
            with_kernel, jax.jit(lambda *args: jax.value_and_grad(loss)(*args))(weights, x)
        )
        < 1e-5
    )
