"""The laws can fail: each way of breaking a reducer on purpose is noticed."""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest
from support.seams import break_function

import shardopt as so
from shardopt.reducers import _mean as mean

pytestmark = pytest.mark.slow  # the contract is broken on purpose

R = so.reducers
TOP_K, POWER_SGD = (
    importlib.import_module(f"shardopt.reducers._{name}") for name in ("top_k", "power_sgd")
)


def owners_forget_what_they_do_not_show(patch):
    patch.setattr(mean.jax.lax, "axis_index", lambda axis: jnp.int32(99), raising=True)


def chunks_go_nowhere(patch):
    break_function(patch, mean.all_to_all_packed, lambda parts, axis_name: list(parts))


def sums_for_means(patch):
    once = mean.all_reduce_padded
    break_function(
        patch,
        mean.all_reduce_padded,
        lambda flat, axis_name, count: once(flat, axis_name, count) * 2,
    )


def indices_one_off(patch):
    once = TOP_K._scatter_sum
    break_function(
        patch,
        TOP_K._scatter_sum,
        lambda indices, values, size: once((indices + 1) % size, values, size),
    )


def bases_not_orthogonal(patch):
    patch.setattr(POWER_SGD.jnp.linalg, "qr", lambda p: (p, None))


def uncompressed_leaves_twice(patch):
    once = mean.mean_of
    break_function(
        patch,
        POWER_SGD.mean_of,
        lambda *args: once(*args) if len(args[0]) != 2 else (list(args[0]), args[0]),
    )


MUTATIONS = [
    (owners_forget_what_they_do_not_show, R.int8(4)),
    (owners_forget_what_they_do_not_show, R.sign(8)),
    (chunks_go_nowhere, R.int8(4)),
    (chunks_go_nowhere, R.exact(jnp.bfloat16)),
    (sums_for_means, R.exact()),
    (indices_one_off, R.top_k(0.3)),
    (bases_not_orthogonal, R.power_sgd(2, min_ratio=0)),
    (uncompressed_leaves_twice, R.power_sgd(2, min_ratio=0)),
]


def lost(reducer, on_devices, draw_gradients):
    """How much of the gradients is neither in the means nor in the memories, and how far the means
    are off, by leaf.
    """
    grads = draw_gradients([(6, 5), (7,)], 3, dtype=np.float64)
    fed_back = R.error_feedback(reducer)
    reduced_grads, state = on_devices(
        lambda g: fed_back.reduce(g, fed_back.init(g), "data"), 3, grads
    )
    missing = [
        3 * reduced_grads[n][0] + state.memory.value[n].sum(0) - np.asarray(g).sum(0)
        for n, g in grads.items()
    ]
    exact = {name: np.asarray(g).mean(0) for name, g in grads.items()}
    errors = [
        np.linalg.norm(reduced_grads[name][0] - mean) / np.linalg.norm(mean)
        for name, mean in exact.items()
    ]
    return max(np.abs(x).max() for x in missing), max(errors)


@pytest.mark.parametrize(
    ("mutate", "reducer"), MUTATIONS, ids=lambda x: getattr(x, "__name__", None) or x.name
)
def test_the_laws_notice_each_mutation(mutate, reducer, on_devices, draw_gradients, x64):
    intact_loss, near = lost(reducer, on_devices, draw_gradients)
    assert intact_loss <= 1e-12
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        broken, far = lost(reducer, on_devices, draw_gradients)
    assert broken > 1e-6 or far > 1.2 * near + 1e-6
