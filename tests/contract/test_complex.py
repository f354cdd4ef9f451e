"""Complex numbers, in the parameters or within the loss, are trained as on one device.

`jax.checkpoint` rounds the floats that its policy keeps, and refuses complex ones: fsdp computes
them again.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.reference import relative_difference
from support.table import STRATEGIES
from support.tiers import tiered

RANDOM = np.random.default_rng(0)


def complex_normal(*shape):
    return (RANDOM.normal(size=shape) + 1j * RANDOM.normal(size=shape)).astype(np.complex64)


PARAMS = {"w": RANDOM.normal(size=(16, 8)).astype(np.float32), "c": complex_normal(16, 8)}
BATCH = {"x": RANDOM.normal(size=(32, 16)).astype(np.float32) / 8, "z": complex_normal(32, 16)}


def real_square(z):
    return jnp.mean((z * z * jnp.conj(z)).real)


def fourier(params, batch):
    return real_square(jnp.fft.rfft(batch["x"] @ params["w"], axis=1) ** 2)


def made_of_parts(params, batch):
    x = batch["x"] @ params["w"]
    return real_square(jax.lax.complex(x, x * x) ** 2)


def cast(params, batch):
    return real_square(jnp.exp((batch["x"] @ params["w"]).astype(jnp.complex64)) ** 2)


def complex_product(params, batch):
    product = jax.lax.dot(batch["x"], params["w"], preferred_element_type=jnp.complex64)
    return real_square(product**2)


def complex_parameters(params, batch):
    return real_square((batch["x"] @ params["c"]) ** 2)


def complex_batch(params, batch):
    return real_square((batch["z"] @ params["w"]) ** 2)


@jax.custom_jvp
def turned(x):
    return jnp.exp(1j * x)


@turned.defjvp
def turned_tangent(primals, tangents):
    return turned(*primals), 1j * turned(*primals) * tangents[0]


def own_derivative(params, batch):
    return real_square(turned(batch["x"] @ params["w"]) ** 2)


def loop(params, batch):
    x = batch["x"] @ params["w"]
    z, _ = jax.lax.scan(lambda z, _: (z * z * jnp.exp(0.1j * x), None), x + 0j, None, length=2)
    return real_square(z)


def eigenvalues(params, batch):
    x = (batch["x"] @ params["w"]).reshape(-1, 2, 4)
    rotation = jnp.array([[0.0, 1.0], [-1.0, 0.0]])
    return real_square(jnp.linalg.eigvals(x @ x.transpose(0, 2, 1) + rotation[None]) ** 2)


def without_gradient(params, batch):
    """Nothing depends on the complex parameter: XLA:CPU aborts on a sum of complex zeros."""
    return jnp.mean((batch["x"] @ params["w"]) ** 2)


def parts(tree):
    return jax.tree.map(lambda x: np.stack([np.real(x), np.imag(x)]), jax.device_get(tree))


LOSSES = [
    fourier,
    made_of_parts,
    cast,
    complex_product,
    complex_parameters,
    complex_batch,
    own_derivative,
    loop,
    eigenvalues,
]
ROWS = [("fsdp", loss, view) for loss in LOSSES for view in ("unproved", "global")]
ROWS += [(strategy, without_gradient, "unproved") for strategy in STRATEGIES]
DEFAULT = [
    ("fsdp", fourier, "unproved"),
    ("fsdp", own_derivative, "global"),
    ("fsdp", complex_parameters, "unproved"),
    ("ddp", without_gradient, "unproved"),
    ("zero2", without_gradient, "unproved"),
]


@pytest.mark.parametrize(
    ("strategy", "loss_fn", "view"),
    tiered(
        ROWS, lambda row: row in DEFAULT, ids=lambda row: f"{row[0]}-{row[1].__name__}-{row[2]}"
    ),
)
def test_complex_numbers_are_trained_as_on_one_device(strategy, loss_fn, view, mesh_of):
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(PARAMS, BATCH)
    expected = jax.tree.map(lambda x, grad: x - 0.01 * grad, PARAMS, grads)
    opt = STRATEGIES[strategy](optax.sgd(0.01), mesh_of(data=8), loss_fn, view=view)
    state, metrics = opt.step(opt.init(PARAMS), BATCH)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert relative_difference(parts(state.params), parts(expected)) < 1e-5


def test_complex_parameters_descend_after_a_chain_that_conjugates_gradients(mesh_of):
    def loss(params, batch):
        return jnp.mean(jnp.abs(batch @ params - (1 + 2j)) ** 2)

    conjugate = optax.stateless(lambda grads, _: jax.tree.map(jnp.conj, grads))
    opt = STRATEGIES["fsdp"](optax.chain(conjugate, optax.sgd(0.5)), mesh_of(data=8), loss)
    state = opt.init(np.zeros(8, np.complex64))
    for _ in range(50):
        state, _ = opt.step(state, np.eye(8, dtype=np.complex64))
    np.testing.assert_allclose(state.params, np.full(8, 1 + 2j), atol=1e-2)
