"""A mixture of experts token by token in numpy's manner, and the same on a mesh with an expert
axis.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

import shardopt as so

MESH_AXES = ("data", "expert", "context", "tensor")


def mesh_of(**sizes):
    """Return a mesh of these axes, each of size 1 where none is given."""
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def drawn(
    rows=4, length=6, width=5, experts=8, hidden=4, *, gated=True, shared=False, dtype=np.float64
):
    """Return arguments of a mixture: weights, x, router, and the weight of each result in a loss."""
    rng = np.random.default_rng(0)
    names = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    names = {name: shape for name, shape in names.items() if gated or name != "gate"}

    def draw(*shape):
        return rng.normal(size=shape).astype(dtype)

    args = {
        "weights": {name: draw(experts, *shape) for name, shape in names.items()},
        "x": draw(rows, length, width),
        "router": draw(width, experts),
        "wanted": draw(rows, length, width),
        "of_load": draw(rows, experts),
    }
    if shared:
        args["shared"] = {name: draw(*shape) for name, shape in names.items()}
    return args


def dense(weights, x, router, *, top_k, score="softmax", normalize=True, bias=None, groups=None, scale=1.0, shared=None,
          activation=jax.nn.silu):  # fmt: skip
    """Return y and statistics. Every expert computes every token, and the experts count that numpy
    would choose one by one.
    """

    def mlp(w, x):
        hidden = (
            activation(x @ w["gate"]) * (x @ w["up"]) if "gate" in w else activation(x @ w["up"])
        )
        return hidden @ w["down"]

    logits = x @ router
    scores = jax.nn.softmax(logits) if score == "softmax" else jax.nn.sigmoid(logits)
    probability = scores / scores.sum(-1, keepdims=True)
    chosen = _chosen(jax.lax.stop_gradient(scores), bias, groups, top_k)
    mask = chosen.astype(x.dtype)
    weight = mask * scores
    if normalize:
        weight = weight / weight.sum(-1, keepdims=True)
    of_each = jax.vmap(mlp, (0, None), 2)(weights, x)
    y = scale * jnp.sum(of_each * weight[..., None], axis=2)
    if shared is not None:
        y = y + mlp(shared, x)
    z = jnp.mean(jax.nn.logsumexp(logits, -1) ** 2, axis=1)
    return y, so.nn.RouterStatistics(mask.mean(1) / top_k, probability.mean(1), z)


def _chosen(scores, bias, groups, top_k):
    """Return [B, T, E], whether an expert is chosen: by sorting, equal scores in order."""
    compared = scores if bias is None else scores + jnp.asarray(bias)[None, None]

    def best(a, k):
        return jnp.argsort(jnp.argsort(-a, -1, stable=True), -1, stable=True) < k

    if groups is not None:
        count, allowed = groups
        grouped_scores = compared.reshape(*compared.shape[:2], count, -1)
        worth = jnp.sort(grouped_scores, -1)[..., -2:].sum(-1)
        compared = jnp.where(best(worth, allowed)[..., None], grouped_scores, -jnp.inf).reshape(
            compared.shape
        )
    return best(compared, top_k)


def results(mixture, args, *, context=False, **how):
    """Return y and the statistics, and the gradients of a loss of both: of weights, x, router and
    shared experts.

    Over context each device gives its share of the loss.
    """
    shares = jax.lax.axis_size("context") if context else 1
    names = [name for name in ("weights", "x", "router", "shared") if name in args]

    def loss(arguments):
        y, statistics = mixture(
            arguments["weights"],
            arguments["x"],
            arguments["router"],
            shared=arguments.get("shared"),
            **how,
        )
        if context:
            statistics = jax.tree.map(lambda a: jax.lax.pmean(a, "context"), statistics)
        balance = jnp.sum(statistics.probability * args["of_load"] * statistics.load) + jnp.sum(
            statistics.z_loss
        )
        return jnp.sum(y * args["wanted"]) + balance / shares, (y, statistics)

    (_, outputs), grads = jax.value_and_grad(loss, has_aux=True)(
        {name: args[name] for name in names}
    )
    return outputs, grads


def on_one_device(args, **how):
    return jax.jit(functools.partial(results, dense, **how))(args)


def program(mesh, args, *, travels=True, **how):
    """Return results in the per-device view, as the step makes it: gradients of replicated leaves
    are summed.
    """
    rows = ("data", "expert")
    of_expert = PartitionSpec("expert" if travels else None)
    tokens = PartitionSpec(rows, "context")
    replicated = PartitionSpec()
    specs = dict.fromkeys(args, replicated) | {
        "x": tokens,
        "wanted": tokens,
        "of_load": PartitionSpec(rows),
    }
    specs["weights"] = of_expert
    names = [name for name in ("weights", "x", "router", "shared") if name in args]

    def f(args):
        outputs, grads = results(
            so.nn.mixture_of_experts, args, context=mesh.shape["context"] > 1, **how
        )
        every = ("data", "expert", "context")
        for name in names:
            over = {"x": (), "weights": ("data", "context") if travels else every}.get(name, every)
            grads[name] = jax.lax.psum(grads[name], over) if over else grads[name]
        return outputs, grads

    out = ((tokens, PartitionSpec(rows)), {name: specs[name] for name in names})
    manual = frozenset(MESH_AXES) - ({"tensor"} if mesh.shape["tensor"] > 1 else set())
    run = jax.shard_map(
        f, mesh=mesh, in_specs=(specs,), out_specs=out, axis_names=manual, check_vma=False
    )
    return jax.jit(run)


def difference(actual, wanted):
    """Return the largest difference of two trees, relative to the largest number of each leaf (or
    1).
    """
    worst = 0.0
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        worst = max(worst, float(np.max(np.abs(a - b)) / max(1.0, np.max(np.abs(b)))))
    return worst
