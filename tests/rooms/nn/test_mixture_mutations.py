"""Comparing with one device notices a mixture of experts that is broken on purpose."""

import dataclasses
import importlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from support.experts import difference, drawn, mesh_of, on_one_device, program
from support.seams import break_function

from shardopt.kernels import _grouped_product as grouped_product
from shardopt.nn import _dispatch as dispatch
from shardopt.nn import _router as router

pytestmark = pytest.mark.slow

mixture = importlib.import_module("shardopt.nn._mixture_of_experts")


def weights_of_experts_dropped(patch):
    right = mixture._run_experts
    break_function(
        patch,
        mixture._run_experts,
        lambda activation, weights, rows, scales, sizes: right(
            activation, weights, rows, 0 * scales + 1, sizes
        ),
    )


def counts_of_this_device_alone(patch):
    alone = vars(jax.lax) | {"all_gather": lambda x, axes: jnp.stack([x] * jax.lax.axis_size(axes))}
    break_function(patch, dispatch.lax, SimpleNamespace(**alone))


def gradients_of_the_first_choice_alone(patch):
    right = dispatch._sum_choices
    break_function(
        patch,
        dispatch._sum_choices,
        lambda n, rows, inverse: right(n, rows, inverse.reshape(n, -1)[:, :1].reshape(-1)),
    )


def experts_of_the_neighbour(patch):
    patch.setattr(
        jax.lax, "axis_index", lambda axes, right=jax.lax.axis_index: (right(axes) + 1) % 4
    )


def router_without_gradient(patch):
    right = mixture.route
    stop = jax.lax.stop_gradient
    break_function(
        patch,
        mixture.route,
        lambda *a, **how: right(*a, **how)._replace(weights=stop(right(*a, **how).weights)),
    )


def weights_not_normalised(patch):
    right = router.route

    def unnormalized(routing, *arrays):
        return right(dataclasses.replace(routing, normalize=False), *arrays)

    break_function(patch, mixture.route, unnormalized)


def tiles_that_reach_into_the_next_group(patch):
    right = grouped_product._visits

    def visits(rows, sizes):
        tile, count, group, first, end = right(rows, sizes)
        return tile, count, group, first, end + 1

    break_function(patch, grouped_product._visits, visits)


BROKEN = [
    None,
    weights_of_experts_dropped,
    counts_of_this_device_alone,
    gradients_of_the_first_choice_alone,
    experts_of_the_neighbour,
    router_without_gradient,
    weights_not_normalised,
    tiles_that_reach_into_the_next_group,
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda value: getattr(value, "__name__", str(value)))
def test_each_mutation_is_noticed(broken, x64, monkeypatch):
    args = drawn()
    wanted = on_one_device(args, top_k=2)
    if broken is not None:
        broken(monkeypatch)
    outcome = program(mesh_of(expert=4), args, top_k=2)(args)
    assert (difference(outcome, wanted) > 1e-3) == (broken is not None)
