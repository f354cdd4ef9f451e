"""A mixture of experts equals every token going through its experts one by one, on one device and
over an expert axis.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.experts import difference, drawn, on_one_device, program, results
from support.experts import mesh_of as expert_mesh
from support.tiers import tiered

import shardopt as so

BIAS = np.array([0.0, 0.3, -0.2, 0.0, 0.1, -0.4, 0.0, 0.2])
WAYS = {
    "softmax": {"top_k": 2},
    "sigmoid": {"top_k": 3, "score": "sigmoid", "bias": BIAS, "groups": (4, 2), "scale": 2.5},
    "all": {"top_k": 8, "normalize": False},
    "one": {"top_k": 1, "normalize": False, "activation": jax.nn.gelu},
    "chunk": {"top_k": 2, "chunk": 7},
}


def one_device(args, **how):
    return jax.jit(functools.partial(results, so.nn.mixture_of_experts, **how))(args)


def without(how, *names):
    return {name: value for name, value in how.items() if name not in names}


@pytest.mark.parametrize("name", tiered(WAYS, lambda name: name == "sigmoid"))
def test_equals_tokens_one_by_one(name, x64):
    how = WAYS[name]
    args = drawn(gated=name != "one", shared=name in ("sigmoid", "all"))
    outcome = one_device(args, **how)
    assert difference(outcome, on_one_device(args, **without(how, "chunk"))) <= 1e-10


@pytest.mark.slow  # test_equals_tokens_one_by_one, without ties
def test_ties_take_the_first_experts_and_others_get_no_gradient(x64):
    args = drawn()
    # all scores equal: the first two experts of each token
    args["router"] = np.tile(args["router"][:, :1], 8)
    outcome = one_device(args, top_k=2)
    assert difference(outcome, on_one_device(args, top_k=2)) <= 1e-10
    load = outcome[0][1].load
    assert np.all(load[:, 0] == 0.5)
    assert np.all(load[:, 2:] == 0)
    assert not np.any(outcome[1]["weights"]["up"][2:])


@pytest.mark.parametrize(
    ("name", "sizes", "travels"),
    [
        pytest.param("softmax", {"expert": 2, "data": 2}, True, marks=pytest.mark.slow),
        pytest.param("sigmoid", {"expert": 4}, True, marks=pytest.mark.slow),
        pytest.param("one", {"expert": 4}, True, marks=pytest.mark.fast),
        pytest.param("chunk", {"expert": 2, "context": 2}, True, marks=pytest.mark.slow),
        pytest.param("softmax", {"expert": 2, "tensor": 2}, True, marks=pytest.mark.slow),
        ("softmax", {"expert": 2, "data": 2}, False),
    ],
    ids=lambda value: str(value),
)
def test_equals_one_device_over_an_expert_axis(name, sizes, travels, x64):
    how = WAYS[name]
    args = drawn(shared=name == "sigmoid")
    if sizes.get("expert") == 4:
        args["router"][:, 5] = -100  # nobody goes to expert 5
    outcome = program(expert_mesh(**sizes), args, travels=travels, **how)(args)
    wanted = on_one_device(args, **without(how, "chunk"))
    assert difference(outcome, wanted) <= 1e-10


@pytest.mark.slow  # losses/test_global_view.py
def test_whole_arrays_under_the_partitioner_give_the_same(x64):
    mesh = expert_mesh(data=2, expert=2, tensor=2)
    args = drawn()
    with jax.set_mesh(mesh):
        outcome = one_device(args, top_k=2, chunk=7)
    assert difference(outcome, on_one_device(args, top_k=2)) <= 1e-10


def test_half_precision_is_near_and_router_in_float32():
    args = drawn(width=16, hidden=8, dtype=np.float32)
    half = {name: leaf if name == "router" else jax.tree.map(lambda a: a.astype(jnp.bfloat16), leaf)
            for name, leaf in args.items()}  # fmt: skip
    outcome = program(expert_mesh(expert=2), half, top_k=2)(half)
    assert outcome[0][0].dtype == jnp.bfloat16
    assert outcome[0][1].load.dtype == jnp.float32
    wanted = on_one_device(jax.tree.map(lambda a: a.astype(jnp.float32), half), top_k=2)
    assert 1e-4 < difference(outcome, wanted) < 0.05


def loss_of_rows(params, batch):
    x = batch["x"] @ params["first"]
    y, statistics = so.nn.mixture_of_experts(
        params["weights"],
        x,
        params["router"],
        bias=params["bias"],
        top_k=2,
        groups=(4, 2),
    )
    updates = so.losses.Updated({"load": jnp.mean(statistics.load, axis=0)})
    balance = so.nn.load_balancing_loss(statistics.load, statistics.probability)
    return jnp.mean((y - batch["x"]) ** 2) + jnp.mean(balance + statistics.z_loss), {
        "updates": updates
    }


def problem():
    args = drawn(rows=8)
    rng = np.random.default_rng(1)
    params = {name: args[name] for name in ("weights", "router")}
    params |= {"first": rng.normal(size=(5, 5)), "bias": np.asarray(BIAS), "load": np.zeros(8)}
    return params, {"x": args["x"]}


def test_a_loss_is_shown_to_be_a_mean_over_rows_and_trains_as_on_one_device(mesh_of, x64):
    params, batch = problem()
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=2), loss_of_rows, micro_batches=2, rules=[("bias", "frozen"), ("load", "frozen")],
                  min_shard_elements=8)  # fmt: skip
    state, _ = opt.step(opt.init(params), batch)
    grads, aux = jax.jit(jax.grad(loss_of_rows, has_aux=True))(params, batch)
    expected = jax.tree.map(lambda leaf, grad: leaf - 0.1 * np.asarray(grad), params, grads)
    expected |= {"bias": params["bias"], "load": aux["updates"].values["load"]}
    assert difference(state.params, expected) <= 1e-10
    assert np.isclose(state.params["load"].sum(), 1)


def dropless_loss(params, batch):
    y, _ = so.nn.mixture_of_experts(params["weights"], batch["x"], params["router"], top_k=2)
    return jnp.mean((y - batch["x"]) ** 2)


@pytest.mark.slow  # the test above, over rows
def test_a_loss_is_shown_to_be_a_mean_over_positions(mesh_of, x64):
    params, batch = problem()
    params = {name: params[name] for name in ("weights", "router")}
    rules = [
        ("weights", "experts"),
        ("weights/down", P(None, "tensor")),
        ("weights/", P(None, None, "tensor")),
    ]
    opt = so.ddp(optax.sgd(0.1), mesh_of(expert=2, context=2, tensor=2), dropless_loss, rules=rules)
    state, _ = opt.step(opt.init(params), batch)
    grads = jax.jit(jax.grad(dropless_loss))(params, batch)
    assert (
        difference(
            state.params,
            jax.tree.map(lambda leaf, grad: leaf - 0.1 * np.asarray(grad), params, grads),
        )
        <= 1e-10
    )


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"top_k": 9}, ValueError, "top_k=9, but a token can go to 8 experts only.\nFix: take at most 8."),
        ({"top_k": 5, "groups": (4, 2)}, ValueError,
         "top_k=5, but a token can go to 4 experts only.\nFix: take at most 4."),
        ({"top_k": 1.0}, TypeError, "top_k must be an integer, got 1.0 (float)."),
        ({"top_k": 2, "groups": (3, 2)}, ValueError,
         "groups=(3, 2): 3 groups of 8 experts, 2 of them open.\n"
         "Fix: take a number of groups that divides the experts, and open at most as many."),
        ({"top_k": 2, "score": "tanh"}, ValueError, "unknown score 'tanh'.\nFix: use 'softmax' or 'sigmoid'."),
        ({"top_k": 2, "chunk": 0}, ValueError, "chunk must be at least 1, got 0."),
        ({"top_k": 2, "bias": np.zeros(4)}, ValueError, "bias has shape (4,).\nFix: give [8]."),
        ({"top_k": 2, "x": np.zeros((4, 6, 3))}, ValueError,
         "x has shape (4, 6, 3), the router (5, 8).\nFix: give x [B, T, D] and router [D, E]."),
        ({"top_k": 2, "x": np.zeros((4, 6, 5), np.float32)}, TypeError,
         "the weights are not of the dtype of x, float32.\n  gate: float64\n  up: float64\n  down: float64\n"
         "Fix: cast one to the other."),
        ({"top_k": 2, "router": np.zeros((5, 6))}, ValueError,
         "the router chooses among 6 experts, the weights here are those of 8.\nFix: give weights [6, ...]."),
        ({"top_k": 2, "shared": {"up": np.zeros((5, 4))}}, ValueError,
         "the shared weights do not fit.\n  up: shape (5, 4)\n"
         "Fix: give 'up' [D, F], 'down' [F, D] and, for gated experts, 'gate' [D, F], with D = 5."),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_bad_arguments_are_refused(change, kind, message):
    args = drawn()
    arguments = {name: args[name] for name in ("weights", "x", "router")} | change
    with pytest.raises(kind, match=f"^{re.escape('mixture_of_experts: ' + message)}$"):
        so.nn.mixture_of_experts(
            arguments.pop("weights"), arguments.pop("x"), arguments.pop("router"), **arguments
        )
