"""Classes of losses that a proof of separability can get wrong: members of each, and near them
losses that are means.

`CLASSES[name][row]` is a `Case`. The oracle of `piecewise` decides whether the loss is separable,
not an opinion. `ACCEPTED` holds losses that the proof must accept."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import shardopt as so


class Case(NamedTuple):
    """A loss on a batch in pieces.

    Attributes:
      loss_fn: `loss_fn(params, batch)`.
      separable: whether it is a (weighted) mean over rows, of this batch in these pieces.
      rows: of the whole batch.
      pieces: how many.
    """

    loss_fn: Callable[..., Any]
    separable: bool = False
    rows: int = 8
    pieces: int = 2


def cases(losses: dict[str, Any], **options: Any) -> dict[str, Case]:
    return {
        name: loss if isinstance(loss, Case) else Case(loss, **options)
        for name, loss in losses.items()
    }


means = functools.partial(cases, separable=True)


def batch_of(rows: int) -> dict[str, np.ndarray]:
    """Return a batch whose masks and weights hide as much as they can."""
    draw = np.random.default_rng(rows)
    return {
        "x": draw.normal(size=(rows, 4)),
        "y": draw.normal(size=(rows, 3)),
        "label": draw.integers(0, 3, rows),
        "mask": np.ones(rows),
        "zeros": np.zeros(rows),
        "seq": draw.normal(size=(rows, 6, 4)),
        "tokens": draw.integers(0, 6, (rows, 6)),
        "image": draw.normal(size=(rows, 6, 6, 2)),
    }


def _parameters() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    sizes = {
        "w": (4, 3),
        "b": (3,),
        "scale": (4,),
        "pos": (16, 4),
        "table": (6, 4),
        "long": (32,),
        "square": (4, 4),
    }
    sizes |= {"kernel": (3, 4, 3), "pixels": (3, 3, 2, 4), "deep": (12, 3)}
    return {name: 0.5 * draw.normal(size=size) for name, size in sizes.items()}


PARAMS = _parameters()
TABLE = np.random.default_rng(2).normal(size=(16, 4))


def rows_of(b: Any) -> int:
    return b["x"].shape[0]


def hidden(p: Any, b: Any) -> jax.Array:
    return jnp.tanh(b["x"] @ p["w"] + p["b"])


def errors(p: Any, b: Any) -> jax.Array:
    return ((hidden(p, b) - b["y"]) ** 2).mean(-1)


def times(weights: Callable[[Any, int], Any]) -> Callable[[Any, Any], Any]:
    """Return the mean of errors, each times its weight: `weights(params, rows)`."""
    return lambda p, b: jnp.mean(errors(p, b) * weights(p, rows_of(b)))


GROWS = cases({
    "positions of rows": times(lambda p, B: p["pos"][:B, 0]),
    "last positions": times(lambda p, B: p["pos"][-B:, 1]),
    "every so many": times(lambda p, B: p["long"][:: 32 // B]),
    "reshaped": lambda p, b: jnp.mean(p["long"].reshape(rows_of(b), -1)[:, :4] * b["x"]),
    "reshaped the other way": lambda p, b: jnp.mean(p["long"].reshape(-1, rows_of(b))[:4].T * b["x"]),
    "its sum over rows": lambda p, b: jnp.mean(b["x"]) * jnp.sum(p["long"][: rows_of(b)]),
    "its mean over rows": lambda p, b: jnp.mean(b["x"] @ p["w"]) + jnp.mean(p["long"][: rows_of(b)]),
    "its largest": lambda p, b: jnp.mean(errors(p, b)) + jnp.max(p["long"][: rows_of(b)] ** 2),
    "closed over": times(lambda p, B: TABLE[:B, 0]),
    "closed over, jnp": times(lambda p, B: jnp.asarray(TABLE)[:B, 2]),
    "closed over, from the end": times(lambda p, B: jnp.asarray(TABLE)[16 - B :, 2]),
    "closed over, flat": lambda p, b: jnp.mean(b["x"] @ p["w"] * jnp.asarray(TABLE).reshape(-1)[: rows_of(b), None]),
    "repeated by the count": times(lambda p, B: jnp.repeat(p["scale"], B // 4)),
    "repeated to the count": times(lambda p, B: jnp.repeat(p["scale"], 2, total_repeat_length=B)),
    "repeated by numbers": times(lambda p, B: jnp.repeat(p["scale"][:2], np.array([1, B - 1]))),
    "tiled then sorted": times(lambda p, B: jnp.sort(jnp.tile(p["scale"], B // 4))),
    "resized": times(lambda p, B: jnp.sort(jnp.resize(p["scale"], (B,)))),
    "padded in front": times(lambda p, B: jnp.pad(jnp.ones(B - 1), (1, 0))),
    "padded between": times(lambda p, B: jax.lax.pad(jnp.ones(B // 2), 0.0, [(B // 4, B // 4, 0)])),
    "edges of a convolution": times(lambda p, B: jnp.convolve(jnp.ones(B), jnp.ones(3), mode="same")),
    "edges of a convolution of the parameters": times(lambda p, B: jnp.convolve(jnp.ones(B), p["b"], mode="same")),
    "edges of a window": times(lambda p, B: jax.lax.reduce_window(jnp.ones(B), 0.0, jax.lax.add, (3,), (1,), "SAME")),
    "edges of a pool": times(
        lambda p, B: linen.avg_pool(jnp.full((1, B, 1), p["b"][0]), (3,), (1,), "SAME")[0, :, 0]
    ),
    "edges of the rows in a convolution": lambda p, b: jnp.mean(
        jax.lax.conv_general_dilated(
            b["x"][None], p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
    ),
    "edges of the rows in a pool": lambda p, b: jnp.mean(
        jax.lax.reduce_window(errors(p, b), 0.0, jax.lax.add, (2,), (1,), "SAME")
    ),
    "linspace": times(lambda p, B: jnp.linspace(0, 1, B)),
    "arange over the count": times(lambda p, B: jnp.arange(B) / B),
    "even rows": lambda p, b: jnp.sum(errors(p, b) * (jnp.arange(rows_of(b)) % 4 == 0)) / rows_of(b) * (1 + rows_of(b)),
    "a window of numpy": times(lambda p, B: np.hanning(B)),
    "numpy's random numbers": times(lambda p, B: np.random.default_rng(0).normal(size=B)),
    "jax's random numbers": times(lambda p, B: jax.random.normal(jax.random.key(0), (B,))),
    "a random order": lambda p, b: jnp.mean(
        errors(p, b)[jax.random.permutation(jax.random.key(1), rows_of(b))] * b["x"][:, 0]
    ),
    "dropout with a constant key": lambda p, b: jnp.mean(
        hidden(p, b) * jax.random.bernoulli(jax.random.key(3), 0.5, b["y"].shape)
    ),
    "a triangle": lambda p, b: jnp.mean(jnp.tri(rows_of(b)) @ errors(p, b)),
    "a shifted diagonal": lambda p, b: jnp.mean(jnp.diag(jnp.ones(rows_of(b) - 1), 1) @ errors(p, b)),
    "a row of the identity": times(lambda p, B: jnp.eye(B)[1]),
    "columns of the identity": lambda p, b: jnp.mean(jnp.eye(rows_of(b), 3) * hidden(p, b)),
    "a running count": times(lambda p, B: jnp.cumsum(jnp.ones(B))),
    "halves of ones and zeros": times(lambda p, B: jnp.concatenate([jnp.ones(2), jnp.zeros(B - 2)])),
    "a one among zeros": times(lambda p, B: jnp.zeros(B).at[0].set(1.0)),
    "all but the last": times(lambda p, B: jnp.ones(B).at[-1].set(0.0)),
    "a dynamic slice": times(lambda p, B: jax.lax.dynamic_slice(p["long"], (3,), (B,))),
    "a split": times(lambda p, B: jnp.split(p["long"], 32 // B)[1]),
    "a lookup by arange": times(lambda p, B: p["pos"][jnp.arange(B), 0]),
    "a lookup by arange, modulo": times(lambda p, B: p["table"][jnp.arange(B) % 6, 0]),
    "vmapped with its number": lambda p, b: jnp.mean(jax.vmap(lambda e, i: e * i)(errors(p, b), jnp.arange(rows_of(b)))),
    "scanned with its number": lambda p, b: jnp.mean(
        jax.lax.scan(lambda i, e: (i + 1, e * i), 0, errors(p, b))[1]
    ),
    "mapped with its position": lambda p, b: jnp.mean(
        jax.lax.map(lambda pair: pair[0] * pair[1], (errors(p, b), p["long"][: rows_of(b)]))
    ),
    "one hot of the count": lambda p, b: jnp.mean(jax.nn.one_hot(b["label"], rows_of(b)) @ p["pos"][: rows_of(b)]) * rows_of(b),
    "one hot over rows": times(lambda p, B: jax.nn.one_hot(1, B)),
    "a matrix of rows": lambda p, b: jnp.mean(p["pos"][: rows_of(b), : rows_of(b)] * b["x"]),
    "contracted with rows": lambda p, b: jnp.sum(p["pos"][: rows_of(b)].T @ errors(p, b)) / rows_of(b),
    "checkpointed positions": lambda p, b: jnp.mean(
        jax.checkpoint(lambda e, t: e * t[: e.shape[0]])(errors(p, b), p["long"])
    ),
    "jitted positions": lambda p, b: jnp.mean(jax.jit(lambda e, t: e * t[: e.shape[0]])(errors(p, b), p["long"])),
    "token positions merged": lambda p, b: jnp.mean(
        b["seq"].reshape(-1, 4)[:, 0] * jnp.sin(jnp.arange(6 * rows_of(b)))
    ),
    "positions wrong by rows": lambda p, b: jnp.mean(
        b["seq"].swapaxes(0, 1) * p["pos"][: rows_of(b)]
    ),
    "an image of rows resized": lambda p, b: jnp.mean(jax.image.resize(hidden(p, b), (3, 3), "linear") ** 2),
    "interpolated": times(lambda p, B: jnp.interp(jnp.linspace(0, 1, B), jnp.linspace(0, 1, 4), p["scale"])),
}) | means({
    "a broadcast": lambda p, b: jnp.mean(jnp.broadcast_to(p["scale"], (rows_of(b), 4)) * b["x"]),
    "a tile of one row": lambda p, b: jnp.mean(jnp.tile(p["scale"], (rows_of(b), 1)) * b["x"]),
    "a repeat of one row": lambda p, b: jnp.mean(jnp.repeat(p["scale"][None], rows_of(b), 0) * b["x"]),
    "ones": times(lambda p, B: np.ones(B)),
    "positions of tokens": lambda p, b: jnp.mean((b["seq"] + p["pos"][:6]) ** 2),
    "token positions modulo": lambda p, b: jnp.mean(b["seq"].reshape(-1, 4) * p["pos"][jnp.arange(6 * rows_of(b)) % 6]),
})  # fmt: skip

FULL_SIZE = {
    **cases({
        "constant length": lambda p, b: jnp.mean(errors(p, b)[:4]),
        "constant length, longer than a piece": lambda p, b: jnp.mean(errors(p, b)[:6]),
        "constant start": lambda p, b: jnp.mean(errors(p, b)[2:]),
        "constant rows of the leaves": lambda p, b: jnp.mean(errors(p, {name: leaf[:6] for name, leaf in b.items()})),
        "a branch on the count": lambda p, b: jnp.mean(errors(p, b)) if rows_of(b) <= 4 else jnp.mean(hidden(p, b)),
        "a branch at exactly the whole": lambda p, b: jnp.mean(errors(p, b)) * (2 if rows_of(b) == 8 else 1),
        "a branch that mixes only the whole": lambda p, b: jnp.mean(errors(p, b)) if rows_of(b) < 8 else jnp.max(errors(p, b)),
        "a branch on evenness": lambda p, b: jnp.mean(errors(p, b)) * (3 if rows_of(b) % 8 == 0 else 1),
        "at least so many": lambda p, b: jnp.sum(errors(p, b)) / max(rows_of(b), 6),
        "at most so many": lambda p, b: jnp.sum(errors(p, b)) / min(rows_of(b), 6),
        "padded to a size": lambda p, b: jnp.mean(jnp.pad(errors(p, b), (0, 8 - rows_of(b)))),
        "padded with ones": lambda p, b: jnp.mean(jnp.concatenate([errors(p, b), jnp.ones(max(0, 6 - rows_of(b)))])),
        "cut to a multiple of three": lambda p, b: jnp.mean(errors(p, b)[: rows_of(b) // 3 * 3]),
        "so many groups": lambda p, b: jnp.mean(errors(p, b).reshape(4, -1).max(1)),
        "so many groups, normed": lambda p, b: jnp.mean(jnp.var(b["x"].reshape(2, -1, 4) @ p["w"], axis=1)),
        "a tail": lambda p, b: jnp.mean(errors(p, b)[-3:]),
        "strides": lambda p, b: jnp.mean(errors(p, b)[::3]),
        "a metric of the first": lambda p, b: (jnp.mean(errors(p, b)), {"first": jnp.mean(errors(p, b)[:4])}),
        "a metric with a branch": lambda p, b: (jnp.mean(errors(p, b)), {"m": jnp.mean(errors(p, b)) if rows_of(b) > 4 else 0.0}),
        "a metric by the count": lambda p, b: (jnp.mean(errors(p, b)), {"m": jnp.sum(errors(p, b)) / max(rows_of(b), 5)}),
        "a while loop to a constant": lambda p, b: jnp.mean(errors(p, b)) * len(range(0, rows_of(b), 5)),
        "a python loop in chunks": lambda p, b: sum(errors(p, b)[i : i + 3].mean() for i in range(0, rows_of(b), 3)) / rows_of(b),
        "constant gather": lambda p, b: jnp.mean(errors(p, b)[jnp.array([0, 1, 2, 3])]),
        "constant gather, clipped": lambda p, b: jnp.mean(jnp.take(errors(p, b), jnp.arange(8), mode="clip")),
        "constant gather, filled": lambda p, b: jnp.mean(jnp.take(errors(p, b), jnp.arange(8), mode="fill", fill_value=0)),
        "constant window": lambda p, b: jnp.mean(jax.lax.reduce_window(errors(p, b), -jnp.inf, jax.lax.max, (3,), (3,), "VALID")),
        "a whole that cannot be cut": lambda p, b: jnp.mean(errors(p, b) * jnp.arange(1.0, 9.0)),
        "top rows": lambda p, b: jnp.mean(jax.lax.top_k(errors(p, b), 4)[0]),
    }),
    **cases({
        "first eight of sixteen": Case(lambda p, b: jnp.mean(errors(p, b)[:8]), False, 16, 4),
        "first four of sixteen": Case(lambda p, b: jnp.mean(errors(p, b)[:4]), False, 16, 4),
        "a size above eight": Case(lambda p, b: jnp.mean(errors(p, b)) if rows_of(b) <= 8 else jnp.mean(hidden(p, b)), False, 16, 2),
        "last but eight": Case(lambda p, b: jnp.mean(errors(p, b)[-8:]), False, 16, 2),
        "pairs in pieces of three": Case(lambda p, b: jnp.mean(errors(p, b)[: rows_of(b) // 2 * 2].reshape(-1, 2).max(1)), False, 12, 4),
        "groups of three": Case(lambda p, b: jnp.mean(errors(p, b).reshape(3, -1).max(1)), False, 12, 2),
    }),
    **cases({
        "batch norm": lambda p, b: jnp.mean(jax.nn.standardize(b["x"] @ p["w"], 0, epsilon=0.1) ** 2 * b["y"]),
        "centred": lambda p, b: jnp.mean((hidden(p, b) - hidden(p, b).mean(0)) ** 2),
        "softmax over rows": lambda p, b: jnp.sum(jax.nn.softmax(errors(p, b)) * b["x"][:, 0]) / rows_of(b),
        "a share of the largest": lambda p, b: jnp.mean(errors(p, b) / errors(p, b).max()),
        "the first": lambda p, b: jnp.mean(errors(p, b)[0]),
        "the last": lambda p, b: jnp.mean(hidden(p, b)[-1]),
        "a cumulative sum": lambda p, b: jnp.mean(jnp.cumsum(errors(p, b))),
        "the largest": lambda p, b: jnp.max(errors(p, b)),
        "the median": lambda p, b: jnp.median(errors(p, b)),
        "a product": lambda p, b: jnp.prod(errors(p, b)),
        "the square of the mean": lambda p, b: jnp.mean(errors(p, b)) ** 2,
        "squeezed": lambda p, b: jnp.linalg.norm(jnp.squeeze(hidden(p, b))),
        "a branch on one row": lambda p, b: jnp.mean(hidden(p, b)) if rows_of(b) == 1 else jnp.mean(errors(p, b)),
        "neighbours": lambda p, b: jnp.mean(errors(p, b) * jnp.roll(b["x"][:, 0], 1)),
        "against all": lambda p, b: -jnp.mean(jnp.diag(jax.nn.log_softmax(hidden(p, b) @ b["y"].T))),
        "a sum": lambda p, b: jnp.sum(errors(p, b)),
        "a norm": lambda p, b: jnp.sqrt(jnp.sum(errors(p, b) ** 2)),
        "by place": lambda p, b: jnp.mean(errors(p, b) * (1 + jnp.arange(rows_of(b)))),
        "logsumexp": lambda p, b: jax.nn.logsumexp(errors(p, b)),
        "divided by its weights": lambda p, b: jnp.sum(errors(p, b) * b["x"][:, 0]) / jnp.sum(b["x"][:, 0]),
        "labels of the first row": lambda p, b: jnp.mean(p["table"][b["label"][:1]] * b["x"]),
        "a carry that is scaled": lambda p, b: jax.lax.scan(lambda c, e: (0.5 * c + e, None), 0.0, errors(p, b))[0],
    }, rows=4, pieces=4),
    **means({
        "chunks that divide": lambda p, b: sum(errors(p, b)[i : i + 2].mean() for i in range(0, rows_of(b), 2)) / (rows_of(b) // 2),
        "groups that divide": lambda p, b: jnp.mean(errors(p, b).reshape(-1, 4).max(1)),
        "more than there are": lambda p, b: jnp.mean(errors(p, b)[:8]),
    }),
}  # fmt: skip
FULL_SIZE = {
    (f"one row each: {name}" if case.rows == case.pieces else name): case
    for name, case in FULL_SIZE.items()
}


def with_slope(
    slope: Callable[[Any, Any], Any], value: Callable[[Any], Any] = lambda x: x
) -> Callable[[Any], Any]:
    """Return a `custom_jvp` function: its tangent is slope(x, t)."""
    fn = jax.custom_jvp(value)
    fn.defjvp(lambda primals, tangents: (value(primals[0]), slope(primals[0], tangents[0])))
    return fn


def another_value(p: Any, b: Any) -> Any:
    """A rule whose value is not the value of its function: the derivative belongs to another loss."""
    fn = jax.custom_jvp(lambda x: jnp.asarray(1.0 / x.shape[0], x.dtype))
    fn.defjvp(lambda primals, _: (jnp.ones((), primals[0].dtype), jnp.zeros((), primals[0].dtype)))
    hidden = b["x"] @ p["w"]
    return fn(hidden) * jnp.sum(hidden**2)


def of_hidden(fn: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda p, b: jnp.mean((fn(b["x"] @ p["w"]) - b["y"]) ** 2)


def of_errors(fn: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return fn(errors), with the number of rows if it takes two arguments."""
    return lambda p, b: (
        fn(errors(p, b), rows_of(b)) if fn.__code__.co_argcount == 2 else fn(errors(p, b))
    )


JVP_RULES = cases({
    "another value": another_value,
    "over the count": of_hidden(with_slope(lambda x, t: t / x.shape[0])),
    "times the count": of_hidden(with_slope(lambda x, t: t * x.shape[0], jnp.sin)),
    "less the mean": of_hidden(with_slope(lambda x, t: t - t.mean(0))),
    "the mean of tangents": of_hidden(with_slope(lambda x, t: jnp.broadcast_to(t.mean(0), t.shape))),
    "by the mean of values": of_hidden(with_slope(lambda x, t: t * jnp.cos(x.mean(0)), jnp.sin)),
    "by the largest value": of_hidden(with_slope(lambda x, t: t / (1 + jnp.max(jnp.abs(x))))),
    "in another order": of_hidden(with_slope(lambda x, t: t[::-1])),
    "by place": of_hidden(with_slope(lambda x, t: t * jnp.arange(1.0, 1 + t.shape[0])[:, None])),
    "of the first rows": of_hidden(with_slope(lambda x, t: t.at[2:].set(0.0))),
    "cumulative": of_hidden(with_slope(lambda x, t: jnp.cumsum(t, 0))),
    "sum of tangents": of_hidden(with_slope(lambda x, t: t + t.sum(0))),
    "on the parameters, by the count": lambda p, b: jnp.mean(
        (lambda x: jax.vmap(with_slope(lambda w, t: t * x.shape[0]), in_axes=1)(p["w"]).T)(b["x"]).T @ b["x"].T
    ),
    "under vmap": lambda p, b: jnp.mean(jax.vmap(with_slope(lambda x, t: t / x.shape[0]), in_axes=1)(b["x"] @ p["w"]) ** 2),
    "under jit": of_hidden(jax.jit(with_slope(lambda x, t: t / x.shape[0]))),
    "under checkpoint": of_hidden(jax.checkpoint(with_slope(lambda x, t: t - t.mean(0)))),
    "under scan": lambda p, b: jnp.mean(
        jax.lax.scan(lambda c, x: (c, with_slope(lambda x, t: t / x.shape[0])(x)), 0.0, b["seq"].swapaxes(0, 1) @ p["w"])[1] ** 2
    ),
    "on a mean": lambda p, b: with_slope(lambda x, t: t * x, lambda x: x)(jnp.mean(errors(p, b))),
    "inside a custom_vjp": of_hidden(lambda x: with_vjp(lambda x, ct: with_slope(lambda x, t: t)(ct / ct.shape[0]))(x)),
}) | means({
    "half the slope": of_hidden(with_slope(lambda x, t: 0.5 * t)),
    "of the row": of_hidden(with_slope(lambda x, t: t * jnp.cos(x), jnp.sin)),
    "normed in the row": of_hidden(with_slope(lambda x, t: t / jnp.sqrt(1 + jnp.sum(x**2, -1, keepdims=True)))),
})  # fmt: skip

EQUATION_PARAMETERS = cases({
    "integer exponents": of_errors(lambda e, B: jnp.mean(jax.lax.integer_pow(e, B // 4 + 1))),
    "real exponents": of_errors(lambda e, B: jnp.mean(e ** (B / 8))),
    "a constant": of_errors(lambda e, B: jnp.mean(jnp.minimum(e, B / 16))),
    "a literal in where": of_errors(lambda e, B: jnp.mean(jnp.where(e > B / 16, e, 0.0))),
    "bounds of clip": of_errors(lambda e, B: jnp.mean(jnp.clip(e, 0, 2 / B))),
    "a feature by the count": lambda p, b: jnp.mean(hidden(p, b)[:, rows_of(b) // 8]),
    "features up to the count": lambda p, b: jnp.mean(b["x"][:, : rows_of(b) // 2]),
    "rolled features": lambda p, b: jnp.mean(jnp.roll(hidden(p, b), rows_of(b) // 4, 1) * b["y"]),
    "an axis by the count": lambda p, b: jnp.mean(jnp.sort(b["seq"][:, :4], axis=1 + rows_of(b) // 8) * p["pos"][:4]),
    "a direction by the count": lambda p, b: jnp.mean(jax.lax.cumsum(b["x"] * p["scale"], 1, reverse=rows_of(b) > 4)[:, :2]),
    "transposed by the count": lambda p, b: jnp.mean(
        b["seq"][:, :4].transpose((0, 1, 2) if rows_of(b) > 4 else (0, 2, 1)) * p["pos"][:4]
    ),
    "contracted by the count": lambda p, b: jnp.mean(
        jnp.einsum("bts,tu->bsu" if rows_of(b) > 4 else "bst,tu->bsu", b["seq"][:, :4], p["square"]) * p["pos"][:4]
    ),
    "precision by the count": of_errors(lambda e, B: jnp.mean(jax.lax.reduce_precision(e, 8, B // 4))),
    "rounded by the count": of_errors(lambda e, B: jnp.mean(jnp.round(e, B // 8))),
    "top features": lambda p, b: jnp.mean(jax.lax.top_k(hidden(p, b), rows_of(b) // 4)[0]),
    "a power of a matrix": lambda p, b: jnp.mean(b["x"] @ jnp.linalg.matrix_power(p["square"], rows_of(b) // 4)),
    "a quantile by the count": lambda p, b: jnp.mean(jnp.quantile(hidden(p, b), 1 / rows_of(b), axis=1)),
    "a temperature by the count": lambda p, b: jnp.mean(jax.nn.softmax(hidden(p, b) / rows_of(b)) * b["y"]),
    "an epsilon by the count": lambda p, b: jnp.mean(jax.nn.standardize(b["x"] * p["scale"], -1, epsilon=1 / rows_of(b)) ** 2),
    "a kernel by the count": lambda p, b: jnp.mean(b["seq"] ** 2 * jnp.exp(-rows_of(b) * p["scale"] ** 2)),
    "strides by the count": lambda p, b: jnp.mean(b["seq"][:, :: rows_of(b) // 4] * p["scale"]),
    "a window by the count": lambda p, b: jnp.mean(
        jax.lax.reduce_window(b["seq"], -jnp.inf, jax.lax.max, (1, rows_of(b) // 4, 1), (1, 1, 1), "VALID")
    ),
    "turns by the count": lambda p, b: jnp.mean(jax.lax.fori_loop(0, rows_of(b) // 4, lambda i, x: jnp.tanh(x), hidden(p, b))),
    "depth by the count": lambda p, b: jnp.mean(functools.reduce(lambda x, _: jnp.sin(x), range(rows_of(b)), hidden(p, b))),
    "a branch number": lambda p, b: jnp.mean(jax.lax.switch(rows_of(b) // 8, [jnp.sin, jnp.cos], hidden(p, b))),
    "a predicate": lambda p, b: jnp.mean(jax.lax.cond(jnp.asarray(rows_of(b)) > 4, jnp.sin, jnp.cos, hidden(p, b))),
    "a function of another name": lambda p, b: jnp.mean((jnp.sin if rows_of(b) > 4 else jnp.cos)(hidden(p, b))),
    "a comparison": of_errors(lambda e, B: jnp.mean(e * ((e < 0.5) if B > 4 else (e > 0.5)))),
    "a closed-over array": of_errors(lambda e, B: jnp.mean(e) * jnp.sum(jnp.asarray(np.full(3, float(B))))),
    "padding of features": lambda p, b: jnp.mean(jnp.pad(hidden(p, b), ((0, 0), (0, rows_of(b) // 4)))),
    "a padding value": lambda p, b: jnp.mean(jnp.pad(hidden(p, b), ((0, 0), (0, 1)), constant_values=rows_of(b))),
    "labels by the count": lambda p, b: jnp.mean(p["table"][jnp.minimum(b["label"] + rows_of(b) // 4, 5)]),
    "a closed-over key": lambda p, b: jnp.mean(b["x"] @ p["w"] + jax.random.normal(jax.random.key(rows_of(b)), (3,))),
    "a dtype by the count": lambda p, b: jnp.mean(hidden(p, b).astype(jnp.float32 if rows_of(b) > 4 else jnp.float64)),
    "a shift of bits": lambda p, b: jnp.mean(p["table"][(b["label"] << (rows_of(b) // 8)) % 6]),
})  # fmt: skip


def carried(
    step: Callable[[Any, Any], Any], start: float = 0.0, of: Callable = lambda c, B: c / B
) -> Callable:
    """Return a loss that scans over errors, and divides the carried number by the count."""
    return lambda p, b: of(
        jax.lax.scan(lambda c, e: (step(c, e), None), start, errors(p, b))[0], rows_of(b)
    )


def carried_rows(
    step: Callable[[Any, Any], Any], start: Callable[[], Any] = lambda: jnp.zeros(3)
) -> Callable:
    """Return a loss that scans over the hidden rows."""

    def last(p, b):
        return jax.lax.scan(lambda c, h: (step(c, h), None), start(), hidden(p, b))[0]

    return lambda p, b: jnp.sum(last(p, b) * p["b"]) / rows_of(b)


CARRIES = cases({
    "scaled": carried(lambda c, e: 0.9 * c + e),
    "scaled by a parameter": lambda p, b: jax.lax.scan(lambda c, e: (p["b"][0] * c + e, None), 0.0, errors(p, b))[0] / rows_of(b),
    "scaled by the row": carried(lambda c, e: c * (1 - e) + e),
    "negated": carried(lambda c, e: e - c),
    "negated twice a turn, once at the end": carried(lambda c, e: -(c + e)),
    "rolled": Case(carried_rows(lambda c, h: jnp.roll(c, 1) + h)),
    "reversed": carried_rows(lambda c, h: c[::-1] + h),
    "transposed": lambda p, b: jnp.sum(
        jax.lax.scan(lambda c, x: (c.T + jnp.outer(x, x), None), jnp.zeros((4, 4)), b["x"] * p["scale"])[0] * p["square"]
    ) / rows_of(b) + jnp.sum(
        jax.lax.scan(lambda c, s: (c.T + s, None), jnp.zeros((4, 4)), b["seq"][:, :4] * p["scale"])[0] * p["square"]
    ) / rows_of(b),
    "replaced": carried(lambda c, e: e, of=lambda c, B: c),
    "replaced now and then": carried(lambda c, e: jnp.where(e > 0.5, e, c + e)),
    "replaced in part": carried_rows(lambda c, h: (c + h).at[0].set(h[0])),
    "indexed": carried_rows(lambda c, h: c[jnp.array([0, 0, 1])] + h),
    "one entry for all": carried_rows(lambda c, h: c[0] + h),
    "sliced": Case(carried_rows(lambda c, h: jnp.concatenate([c[1:], c[:1]]) + h)),
    "shifted in": carried_rows(lambda c, h: jnp.concatenate([c[1:], h[:1]])),
    "summed over features": carried_rows(lambda c, h: jnp.sum(c) + h),
    "averaged over features": carried_rows(lambda c, h: jnp.mean(c) + h),
    "through a matrix": lambda p, b: jnp.mean(
        jax.lax.scan(lambda c, x: (c @ p["square"] + x, None), jnp.zeros(4), b["x"])[0]
    ) / rows_of(b),
    "multiplied": carried(lambda c, e: c * e, 1.0),
    "multiplied by one and more": carried(lambda c, e: c * (1 + 0.1 * e), 1.0),
    "squared": carried(lambda c, e: c**2 * 0.1 + e),
    "doubled": carried(lambda c, e: c + c + e),
    "clipped": carried(lambda c, e: jnp.minimum(c + e, 1.0)),
    "rounded": carried(lambda c, e: jnp.round(c + e, 1) + 0.01 * e),
    "of whole numbers": carried(lambda c, e: jnp.floor(c) + e),
    "largest": carried(lambda c, e: jnp.maximum(c, e), of=lambda c, B: c),
    "through tanh": carried(lambda c, e: jnp.tanh(c) + e),
    "without its gradient": carried(lambda c, e: jax.lax.stop_gradient(c) + e),
    "times the row without its gradient": carried(lambda c, e: c + jax.lax.stop_gradient(e) * c, 1.0),
    "by a condition on the carry": carried(lambda c, e: jnp.where(c < 1, c + e, c)),
    "by cond on the carry": carried(lambda c, e: jax.lax.cond(c < 1, lambda: c + e, lambda: c - e)),
    "the term depends on the carry": carried(lambda c, e: c + jnp.sin(e + c)),
    "a start that is not zero": carried(lambda c, e: c + e, 1.0),
    "a start by the count": lambda p, b: jax.lax.scan(lambda c, e: (c + e, None), 1.0 * rows_of(b) ** 2, errors(p, b))[0] / rows_of(b),
    "a start from the parameters": lambda p, b: jax.lax.scan(lambda c, e: (c + e, None), p["b"][0], errors(p, b))[0] / rows_of(b),
    "a start from a row": lambda p, b: jax.lax.scan(lambda c, e: (c + e, None), errors(p, b)[0], errors(p, b))[0] / rows_of(b),
    "two that swap": lambda p, b: jax.lax.scan(lambda c, e: ((c[1], c[0] + e), None), (0.0, 0.0), errors(p, b))[0][1] / rows_of(b),
    "one that feeds another": lambda p, b: jax.lax.scan(
        lambda c, e: ((c[0] + e, c[1] + c[0]), None), (0.0, 0.0), errors(p, b)
    )[0][1] / rows_of(b),
    "a counter as weight": lambda p, b: jax.lax.scan(
        lambda c, e: ((c[0] + 1.0, c[1] + c[0] * e), None), (0.0, 0.0), errors(p, b)
    )[0][1] / rows_of(b),
    "a counter as index": lambda p, b: jax.lax.scan(
        lambda c, e: ((c[0] + 1, c[1] + p["long"][c[0]] * e), None), (0, 0.0), errors(p, b)
    )[0][1] / rows_of(b),
    "a flag for the first row": lambda p, b: jax.lax.scan(
        lambda c, e: ((False, c[1] + jnp.where(c[0], 0.0, e)), None), (True, 0.0), errors(p, b)
    )[0][1] / rows_of(b),
    "the row before": lambda p, b: jnp.mean(
        jax.lax.scan(lambda c, e: (e, e * c), 0.0, errors(p, b))[1]
    ),
    "running sums": lambda p, b: jnp.mean(jax.lax.scan(lambda c, e: (c + e, c + e), 0.0, errors(p, b))[1]),
    "running sums, scaled back": lambda p, b: jnp.mean(jax.lax.scan(lambda c, e: (c + e, (c + e) / rows_of(b)), 0.0, errors(p, b))[1]),
    "a place by the counter": Case(lambda p, b: jnp.sum(
        jax.lax.scan(lambda c, e: ((c[0] + 1, c[1].at[c[0] % 3].add(e)), None), (0, jnp.zeros(3)), errors(p, b))[0][1] * p["b"]
    ) / rows_of(b)),
    "a place set by the label": lambda p, b: jnp.sum(
        jax.lax.scan(lambda c, r: (c.at[r[1]].set(r[0]), None), jnp.zeros(3), (errors(p, b), b["label"]))[0]
    ) / rows_of(b),
    "fori over rows, scaled": lambda p, b: jax.lax.fori_loop(
        0, rows_of(b), lambda i, c: 0.5 * c + errors(p, b)[i], 0.0
    ) / rows_of(b),
    "fori over rows, by place": lambda p, b: jax.lax.fori_loop(
        0, rows_of(b), lambda i, c: c + i * errors(p, b)[i], 0.0
    ) / rows_of(b),
    "fori over half of the rows": lambda p, b: jax.lax.fori_loop(
        0, rows_of(b) // 2, lambda i, c: c + errors(p, b)[i], 0.0
    ) / rows_of(b) * 2,
    "fori over four rows": lambda p, b: jax.lax.fori_loop(0, 4, lambda i, c: c + errors(p, b)[i], 0.0) / 4,
    "fori over the same row": lambda p, b: jax.lax.fori_loop(0, rows_of(b), lambda i, c: c + errors(p, b)[0], 0.0) / rows_of(b),
    "while over rows until enough": lambda p, b: jnp.mean(hidden(p, b)) * jax.lax.while_loop(
        lambda c: (c[1] < 1.0) & (c[0] < rows_of(b)),
        lambda c: (c[0] + 1, c[1] + jax.lax.stop_gradient(errors(p, b))[c[0]]), (0, 0.0)
    )[1],
    "a python loop, scaled": lambda p, b: functools.reduce(lambda c, i: 0.5 * c + errors(p, b)[i], range(rows_of(b)), 0.0),
    "parameters that learn along the rows": lambda p, b: jnp.mean(
        jax.lax.scan(lambda w, r: (w - 0.1 * jnp.outer(r[0], r[0] @ w - r[1]), r[0] @ w), p["w"], (b["x"], b["y"]))[1] ** 2
    ),
    "a moving average of rows": lambda p, b: jnp.mean(
        (b["x"] - jax.lax.scan(lambda c, x: (0.9 * c + 0.1 * x,) * 2, p["scale"], b["x"])[1]) ** 2
    ),
    "a recurrent net along the rows": lambda p, b: jnp.mean(
        jax.lax.scan(lambda c, x: (jnp.tanh(c @ p["square"] + x),) * 2, jnp.zeros(4), b["x"])[1] @ p["w"]
    ),
    "an associative scan": lambda p, b: jnp.mean(jax.lax.associative_scan(jnp.multiply, errors(p, b))),
    "a linear recurrence": lambda p, b: jnp.mean(
        jax.lax.associative_scan(lambda a, c: (a[0] * c[0], a[1] * c[0] + c[1]), (0.5 * jnp.ones(rows_of(b)), errors(p, b)))[1]
    ),
    "inside a custom rule": lambda p, b: jax.lax.scan(
        lambda c, e: (c + with_slope(lambda x, t: 0.5 * t)(c + e) - c, None), 0.0, errors(p, b)
    )[0] / rows_of(b),
    "scans in a scan": lambda p, b: jnp.mean(jax.lax.scan(
        lambda c, s: jax.lax.scan(lambda d, x: (0.9 * d + x @ p["scale"], d), c, s), 0.0, b["seq"]
    )[1]),
    "tokens of all rows in one scan": lambda p, b: jnp.mean(
        jax.lax.scan(lambda c, x: (jnp.tanh(c + x),) * 2, p["scale"], b["seq"].reshape(-1, 4))[1]
    ),
}, rows=12, pieces=4) | means({
    "a sum": carried(lambda c, e: c + e),
    "a sum, the row first": carried(lambda c, e: e * 2 + c),
    "two sums": lambda p, b: so.losses.Weighted(*jax.lax.scan(
        lambda c, r: ((c[0] + r[0] * r[1], c[1] + r[1]), None), (0.0, 0.0), (errors(p, b), b["mask"])
    )[0]),
    "a sum in a place": carried_rows(lambda c, h: c.at[1].add(h[0])),
    "along time": lambda p, b: jnp.mean(
        jax.lax.scan(lambda c, x: (jnp.tanh(c @ p["square"] + x),) * 2, jnp.zeros((rows_of(b), 4)), b["seq"].swapaxes(0, 1))[1]
    ),
    "rounded to what it is": carried(lambda c, e: jnp.round(c + e, 1)),
    "negated twice, an even number of rows": Case(carried(lambda c, e: e - c), True),
    "two that swap, an even number of rows": Case(lambda p, b: jax.lax.scan(
        lambda c, e: ((c[1], c[0] + e), None), (0.0, 0.0), errors(p, b))[0][1] / rows_of(b), True),
    "negated together": carried(lambda c, e: -(-c - e)),
}, rows=12, pieces=4)  # fmt: skip


def with_vjp(
    backward: Callable[[Any, Any], Any], value: Callable[[Any], Any] = lambda x: x
) -> Callable[[Any], Any]:
    """Return a `custom_vjp` function: its cotangent is backward(x, ct)."""
    fn = jax.custom_vjp(value)
    fn.defvjp(lambda x: (value(x), x), lambda x, ct: (backward(x, ct),))
    return fn


def of_weights(fn: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda p, b: jnp.mean((jnp.tanh(b["x"] @ fn(p["w"])) - b["y"]) ** 2)


DEGREES = cases({
    "backward over the count": of_hidden(with_vjp(lambda x, ct: ct / x.shape[0])),
    "backward times the count": of_hidden(with_vjp(lambda x, ct: ct * ct.shape[0])),
    "backward less the mean": of_hidden(with_vjp(lambda x, ct: ct - ct.mean(0))),
    "backward by its norm": of_hidden(with_vjp(lambda x, ct: ct / (1 + jnp.linalg.norm(ct)))),
    "backward by the norm of the row": of_hidden(with_vjp(lambda x, ct: ct / (0.1 + jnp.linalg.norm(ct, axis=-1, keepdims=True)))),
    "backward by sign": of_hidden(with_vjp(lambda x, ct: jnp.sign(ct))),
    "backward clipped": of_hidden(with_vjp(lambda x, ct: jnp.clip(ct, -0.01, 0.01))),
    "backward plus one": of_hidden(with_vjp(lambda x, ct: ct + 1)),
    "backward by values": of_hidden(with_vjp(lambda x, ct: x)),
    "backward squared": of_hidden(with_vjp(lambda x, ct: ct**2)),
    "backward where large": of_hidden(with_vjp(lambda x, ct: jnp.where(jnp.abs(ct) > 0.02, ct, 0))),
    "backward summed over rows": of_hidden(with_vjp(lambda x, ct: jnp.broadcast_to(ct.sum(0), ct.shape))),
    "backward by place": of_hidden(with_vjp(lambda x, ct: ct * jnp.arange(ct.shape[0])[:, None])),
    "backward by the mean of values": of_hidden(with_vjp(lambda x, ct: ct * jnp.mean(x))),
    "backward of the weights by sign": of_weights(with_vjp(lambda w, ct: jnp.sign(ct))),
    "backward of the weights plus one": of_weights(with_vjp(lambda w, ct: ct + 1)),
    "backward of the weights plus one, weighted": lambda p, b: so.losses.Weighted(
        jnp.sum((b["x"] @ with_vjp(lambda w, ct: ct + 1)(p["w"])) ** 2), rows_of(b)
    ),
    "backward of means by sign alone": lambda p, b: with_vjp(lambda x, ct: jnp.sign(ct))((b["x"] @ p["w"]).mean(0)).sum(),
    "backward of means plus one": lambda p, b: with_vjp(lambda x, ct: ct + 1)((b["x"] @ p["w"]).mean(0)).sum(),
    "backward of means is one": lambda p, b: with_vjp(lambda x, ct: jnp.ones_like(x))((b["x"] @ p["w"]).mean(0)).sum(),
    "backward of the weights by norm": of_weights(with_vjp(lambda w, ct: ct / (1 + jnp.linalg.norm(ct)))),
    "backward of the weights decays": of_weights(with_vjp(lambda w, ct: ct * jnp.sum(ct * w))),
    "backward of the mean by sign": lambda p, b: with_vjp(lambda x, ct: jnp.sign(ct) * x)(jnp.mean(errors(p, b))),
    "turns that halve": of_errors(lambda e, B: jnp.mean(jax.lax.fori_loop(0, B, lambda i, c: c * 0.9, e))),
    "turns that count": of_errors(lambda e, B: jnp.mean(e) * jax.lax.fori_loop(0, B, lambda i, c: c + 1.0, 0.0)),
    "turns that add": of_errors(lambda e, B: jnp.mean(jax.lax.scan(lambda c, _: (c + e, None), jnp.zeros(B), None, length=B)[0])),
    "turns until the count": of_errors(
        lambda e, B: jnp.mean(e) * jax.lax.while_loop(lambda c: c < B, lambda c: c * 2, jnp.asarray(1.0))
    ),
    "turns over rows without them": lambda p, b: jnp.mean(
        jax.lax.scan(lambda c, _: (jnp.sin(c), None), p["b"], b["x"])[0] * hidden(p, b)
    ),
    "a product": of_errors(lambda e: jnp.prod(e)),
    "a root of a product": of_errors(lambda e, B: jnp.prod(e) ** (1 / B)),
    "the largest": of_errors(lambda e: jnp.max(e)),
    "the smallest": of_errors(lambda e: jnp.min(e)),
    "the largest by sorting": of_errors(lambda e: jnp.sort(e)[-1]),
    "the upper half": of_errors(lambda e, B: jnp.mean(jnp.sort(e)[B // 2 :])),
    "sorted by place": of_errors(lambda e, B: jnp.mean(jnp.sort(e) * jnp.arange(B))),
    "sorted beside labels": lambda p, b: jnp.mean(jnp.sort(errors(p, b)) * b["x"][:, 0]),
    "ranks": of_errors(lambda e: jnp.mean(jnp.argsort(jnp.argsort(e)) * e)),
    "the median": of_errors(lambda e: jnp.median(e)),
    "logsumexp": of_errors(lambda e: jax.nn.logsumexp(e)),
    "log mean exp": of_errors(lambda e, B: jax.nn.logsumexp(e) - jnp.log(B)),
    "log of sums of exp": of_errors(lambda e: jnp.log(jnp.sum(jnp.exp(e)))),
    "softmax over rows": of_errors(lambda e: jnp.mean(jax.nn.softmax(e) * e)),
    "log softmax over rows": of_errors(lambda e: jnp.mean(jax.nn.log_softmax(e))),
    "power of the count": of_errors(lambda e, B: jnp.mean(e) ** (B / 8)),
    "the square of the mean": of_errors(lambda e: jnp.mean(e) ** 2),
    "the mean times itself": of_errors(lambda e: jnp.mean(e) * e.mean()),
    "sum squared over count squared": of_errors(lambda e, B: jnp.sum(e) ** 2 / B**2),
    "sum squared over the count": of_errors(lambda e, B: jnp.sum(e) ** 2 / B),
    "the root of the sum": of_errors(lambda e, B: jnp.sqrt(jnp.sum(e)) / B),
    "the sum over the root of the count": of_errors(lambda e, B: jnp.sum(e) / B**0.5),
    "the sum over the count less one": of_errors(lambda e, B: jnp.sum(e) / (B - 1)),
    "the mean times the count": of_errors(lambda e, B: jnp.mean(e) * B),
    "sum of two degrees": of_errors(lambda e: jnp.mean(e) + 1e-3 * jnp.sum(e)),
    "count times sum over square": of_errors(lambda e, B: jnp.sum(e) * jnp.sum(jnp.ones(B)) / B),
    "norm": of_errors(lambda e: jnp.linalg.norm(e)),
    "variance": of_errors(lambda e: jnp.var(e)),
    "geometric mean": of_errors(lambda e: jnp.exp(jnp.mean(jnp.log(1 + e)))),
    "harmonic mean": of_errors(lambda e: 1 / jnp.mean(1 / (1 + e))),
    "absolute mean": lambda p, b: jnp.abs(jnp.mean(hidden(p, b))),
    "positive mean": lambda p, b: jax.nn.relu(jnp.mean(hidden(p, b) - b["y"])),
    "mean where positive": lambda p, b: (lambda m: jnp.where(m > 0, m, 0.5 * m))(jnp.mean(hidden(p, b))),
    "mean by its own size": of_errors(lambda e: jnp.mean(e) / jax.lax.stop_gradient(jnp.mean(e))),
    "mean rounded": of_errors(lambda e: jnp.round(jnp.mean(e), 2) + jnp.mean(e)),
    "sign of the mean": lambda p, b: jnp.sign(jnp.mean(hidden(p, b))) + jnp.mean(hidden(p, b)),
    "mean over rows, then features": lambda p, b: jnp.mean(jnp.mean(hidden(p, b), 0) ** 2),
    "largest of the means": lambda p, b: jnp.max(jnp.mean(hidden(p, b), 0)),
    "norm of the means": lambda p, b: jnp.linalg.norm(jnp.mean(hidden(p, b), 0)),
    "gram matrix": lambda p, b: jnp.mean((hidden(p, b).T @ hidden(p, b) / rows_of(b)) ** 2),
    "gram matrix, not divided": lambda p, b: jnp.mean(hidden(p, b).T @ hidden(p, b)),
    "determinant": lambda p, b: jnp.linalg.slogdet(b["x"].T @ b["x"] / rows_of(b) + jnp.eye(4))[1],
    "solved by least squares": lambda p, b: jnp.mean(jnp.linalg.solve(b["x"].T @ b["x"] + jnp.eye(4), b["x"].T @ b["y"]) * p["w"]),
    "products of all pairs": lambda p, b: jnp.mean(hidden(p, b) @ hidden(p, b).T),
    "outer": of_errors(lambda e: jnp.mean(jnp.outer(e, e))),
    "differences of pairs": of_errors(lambda e: jnp.mean(jnp.abs(e[:, None] - e[None]))),
    "an index from the end": of_errors(lambda e, B: e[B - 1]),
    "an index in the middle": lambda p, b: jnp.mean(hidden(p, b)[rows_of(b) // 2]),
    "a slice start by the count": of_errors(lambda e, B: jnp.mean(jax.lax.dynamic_slice(e, (B // 2,), (2,)))),
    "a parameter by the count": lambda p, b: jnp.mean(errors(p, b)) * p["long"][rows_of(b)],
    "a dynamic parameter by the count": lambda p, b: jnp.mean(errors(p, b) * jax.lax.dynamic_index_in_dim(p["long"], rows_of(b) - 1, 0)),
    "a slice of parameters by the count": lambda p, b: jnp.mean(b["x"] * jax.lax.dynamic_slice(p["long"], (rows_of(b),), (4,))),
    "parameters from the count on": lambda p, b: jnp.mean(b["x"]) * jnp.mean(p["long"][rows_of(b) :]),
    "a sum in the first place": of_errors(lambda e, B: jnp.mean(jnp.zeros(B).at[0].set(e.sum()) ** 2)),
    "a sum in the first place, as it is": of_errors(lambda e, B: jnp.zeros(B).at[0].set(e.sum()).sum()),
    "a sum in a constant vector": of_errors(lambda e, B: jnp.mean(jnp.zeros(8).at[0].set(e.sum()))),
    "a sum padded": of_errors(lambda e, B: jnp.sum(jnp.pad(e.sum()[None], (0, B - 1)))),
    "a sum before zeros": of_errors(lambda e, B: jnp.max(jnp.concatenate([e.sum()[None], jnp.zeros(B - 1)]))),
    "a sum where the row is the first": of_errors(lambda e, B: jnp.sum(jnp.where(jnp.arange(B) == 0, e.sum(), 0.0))),
    "a sum on the diagonal": of_errors(lambda e, B: jnp.mean(jnp.diag(jnp.zeros(B).at[1].set(e.sum())))),
    "a sum times one hot": of_errors(lambda e, B: jnp.sum(e.sum() * jax.nn.one_hot(0, B))),
    "a sum in the last place": of_errors(lambda e, B: jnp.zeros(B).at[B - 1].add(e.sum())[-1]),
    "a mean among zeros": of_errors(lambda e, B: jnp.mean(jnp.zeros(B).at[0].set(e.mean()))),
    "a sum for every row": of_errors(lambda e, B: jnp.mean(jnp.full((B,), e.sum()))),
    "a sum in place of a row": of_errors(lambda e: jnp.mean(e.at[0].set(e.sum()))),
    "a sum by update of a slice": of_errors(lambda e, B: jnp.sum(jax.lax.dynamic_update_slice(jnp.zeros(B), e.sum()[None], (0,)))),
    "a sum in row and mean": of_errors(lambda e, B: jnp.mean(jnp.zeros((B, 2)).at[:, 0].set(e.mean()).at[0, 1].set(e.mean()))),
    "cumulative": of_errors(lambda e: jnp.mean(jnp.cumsum(e))),
    "cumulative, as a mean": of_errors(lambda e, B: jnp.mean(jnp.cumsum(e) / jnp.arange(1, B + 1))),
    "entropy of the mean": lambda p, b: (lambda q: -jnp.sum(q * jnp.log(q)))(jax.nn.softmax(hidden(p, b)).mean(0)),
    "weights not declared": lambda p, b: jnp.sum(errors(p, b) * b["mask"]) / jnp.sum(b["mask"]),
    "weights of ones, averaged": lambda p, b: jnp.average(errors(p, b), weights=b["mask"]),
    "a mean over a mask": lambda p, b: jnp.mean(errors(p, b), where=b["mask"] > 0.5),
    "weighted sum over mean weight": lambda p, b: so.losses.Weighted(jnp.sum(errors(p, b)), jnp.mean(b["mask"])),
    "weighted mean over sum": lambda p, b: so.losses.Weighted(jnp.mean(errors(p, b)), jnp.sum(b["mask"])),
    "weights squared": lambda p, b: so.losses.Weighted(jnp.sum(errors(p, b)), jnp.sum(b["mask"]) ** 2),
    "weights at least one": lambda p, b: so.losses.Weighted(jnp.sum(errors(p, b)), jnp.maximum(jnp.sum(b["mask"]), 5.0)),
    "weights and an epsilon": lambda p, b: so.losses.Weighted(jnp.sum(errors(p, b)), jnp.sum(b["mask"]) + 0.1),
    "a constant weight": lambda p, b: so.losses.Weighted(jnp.sum(errors(p, b)), 8.0),
    "a constant total": lambda p, b: so.losses.Weighted(1.0, jnp.sum(b["x"][:, 0] ** 2)),
    "two terms, one mean": lambda p, b: so.losses.Weighted((jnp.sum(errors(p, b)), jnp.mean(errors(p, b))), (8.0 * rows_of(b), jnp.sum(b["mask"]))),
    "hidden behind zeros": lambda p, b: jnp.mean(errors(p, b)) + jnp.sum(b["zeros"]) ** 2,
    "hidden behind zeros, in a product": lambda p, b: jnp.mean(errors(p, b)) + jnp.sum(b["zeros"] * b["x"][::-1, 0]) / rows_of(b),
    "hidden behind a mask": lambda p, b: jnp.mean(errors(p, b)) * jnp.prod(b["mask"]),
}) | means({
    "half of the gradient": of_hidden(with_vjp(lambda x, ct: 0.5 * ct)),
    "the gradient by value": of_hidden(with_vjp(lambda x, ct: ct * jnp.tanh(x))),
    "half of the gradient of weights": of_weights(with_vjp(lambda w, ct: 0.5 * ct)),
    "the gradient of weights by value": of_weights(with_vjp(lambda w, ct: ct * jnp.sum(w))),
    "a product with itself": of_errors(lambda e, B: e @ e / B),
    "a trace": lambda p, b: jnp.trace(hidden(p, b).T @ hidden(p, b)) / rows_of(b),
    "the last of a cumulative sum": of_errors(lambda e, B: jnp.cumsum(e)[-1] / B),
    "a mean in a place": of_errors(lambda e: jnp.sum(jnp.zeros(3).at[1].set(e.mean()))),
    "a mean for every row": of_errors(lambda e, B: jnp.mean(jnp.full((B,), e.mean()))),
    "sums by class": lambda p, b: jnp.sum(jax.ops.segment_sum(errors(p, b), b["label"], 3) * p["b"]) / rows_of(b),
    "ratio of means": lambda p, b: so.losses.Weighted(jnp.mean(errors(p, b)), jnp.mean(b["mask"] + 1)),
})  # fmt: skip


def flat(b: Any) -> jax.Array:
    return b["x"].reshape(-1)


def tokens_of(b: Any) -> jax.Array:
    return b["seq"].reshape(-1, 4)


GATHERS = cases({
    "arange in flat rows": lambda p, b: jnp.mean(flat(b)[jnp.arange(rows_of(b))] * p["b"][0]),
    "arange times two in flat rows": lambda p, b: jnp.mean(flat(b)[2 * jnp.arange(rows_of(b))] ** 2),
    "the end of flat rows": lambda p, b: jnp.mean(flat(b)[3 * rows_of(b) + jnp.arange(rows_of(b))]),
    "arange in tokens": lambda p, b: jnp.mean((tokens_of(b) @ p["w"])[jnp.arange(rows_of(b))]),
    "arange times four in tokens of six": lambda p, b: jnp.mean((tokens_of(b) @ p["w"])[4 * jnp.arange(rows_of(b))]),
    "labels in flat rows": lambda p, b: jnp.mean(flat(b)[b["label"]]),
    "labels among rows": lambda p, b: jnp.mean(hidden(p, b)[b["label"]]),
    "labels plus place, off by one": lambda p, b: jnp.mean(flat(b)[3 * jnp.arange(rows_of(b)) + b["label"]]),
    "a dynamic slice of tokens": lambda p, b: jnp.mean(jax.lax.dynamic_slice(tokens_of(b), (0, 0), (rows_of(b), 4))),
    "a dynamic slice of tokens from the count": lambda p, b: jnp.mean(
        jax.lax.dynamic_slice(tokens_of(b), (rows_of(b), 0), (rows_of(b), 4))
    ),
    "a dynamic slice from the first label": lambda p, b: jnp.mean(jax.lax.dynamic_slice(errors(p, b), (b["label"][0],), (2,))),
    "a slice of tokens": lambda p, b: jnp.mean(tokens_of(b)[: rows_of(b)]),
    "a stride of tokens": lambda p, b: jnp.mean(tokens_of(b)[::5] * p["scale"]),
    "flat rows in another order": lambda p, b: jnp.mean(flat(b).reshape(4, -1).T @ p["w"] * b["y"]),
    "columns as rows": lambda p, b: jnp.mean(b["x"].T.reshape(rows_of(b), 4) * b["mask"][:, None] @ p["w"] * b["y"]),
    "time as rows": lambda p, b: jnp.mean(b["seq"].swapaxes(0, 1).reshape(rows_of(b), 6, 4)[:, 0] * b["x"]),
    "arange of merged dims": lambda p, b: jnp.mean(tokens_of(b)[:, 0] * jnp.arange(6 * rows_of(b))),
    "number of the row": lambda p, b: jnp.mean(tokens_of(b)[:, 0] * (jnp.arange(6 * rows_of(b)) // 6)),
    "number modulo the count": lambda p, b: jnp.mean(tokens_of(b)[:, 0] * (jnp.arange(6 * rows_of(b)) % rows_of(b))),
    "number modulo five in dims of six": lambda p, b: jnp.mean(tokens_of(b) * p["pos"][jnp.arange(6 * rows_of(b)) % 5]),
    "a grid of numbers": lambda p, b: jnp.mean(b["x"] * jnp.arange(4 * rows_of(b)).reshape(rows_of(b), 4)),
    "every third of two batches": lambda p, b: jnp.mean(jnp.concatenate([b["x"], 2 * b["x"] + 1])[::3] ** 2),
    "the middle of two batches": lambda p, b: jnp.mean(
        jnp.concatenate([b["x"], b["x"] ** 2])[rows_of(b) // 2 : -(rows_of(b) // 2)] @ p["w"]
    ),
    "a sum times place": of_errors(lambda e, B: jnp.mean(e.sum() * jnp.arange(B))),
    "a sum times rows": lambda p, b: jnp.mean(errors(p, b).sum() * hidden(p, b)),
    "a mean times rows": lambda p, b: jnp.mean(errors(p, b).mean() * hidden(p, b)),
    "a mean times a mask": lambda p, b: jnp.mean(errors(p, b).mean() * b["mask"]),
    "a mean times a mask of place": of_errors(lambda e, B: jnp.mean(e.mean() * (jnp.arange(B) < 4))),
    "a mean where rows": lambda p, b: jnp.mean(jnp.where(b["x"][:, 0] > 0, errors(p, b).mean(), 0.0)),
    "rows less the mean, squared": of_errors(lambda e: jnp.mean((e - e.mean()) ** 2)),
    "rows above the mean": of_errors(lambda e: jnp.mean(jnp.where(e > e.mean(), e, 0.0))),
    "labels modulo the count": lambda p, b: jnp.mean(errors(p, b)[(b["label"] * 3) % rows_of(b)]),
    "along rows": lambda p, b: jnp.mean(jnp.take_along_axis(hidden(p, b), b["label"][:, None], 0)),
    "the next row": of_errors(lambda e, B: jnp.mean(e * e[(jnp.arange(B) + 1) % B])),
    "the row before": of_errors(lambda e, B: jnp.mean(e * e[jnp.arange(B) - 1])),
    "pairs of rows by half": of_errors(lambda e, B: jnp.mean(e[jnp.arange(B) // 2])),
    "the mirrored row": lambda p, b: jnp.mean(errors(p, b)[::-1] * b["x"][:, 0]),
    "rolled rows beside others": lambda p, b: jnp.mean(jnp.roll(errors(p, b), 1) * b["x"][:, 0]),
    "sorted by content, beside others": lambda p, b: jnp.mean(errors(p, b)[jnp.argsort(b["mask"] + b["x"][:, 1])] * b["x"][:, 0]),
    "scattered by place": Case(lambda p, b: jnp.mean(
        jnp.zeros(rows_of(b)).at[jnp.arange(rows_of(b)) // 2].add(errors(p, b)) ** 2
    ), False, 12, 4),
    "scattered by label": lambda p, b: jnp.mean(jnp.zeros(3).at[b["label"]].add(errors(p, b)) ** 2),
    "scattered by label, set": lambda p, b: jnp.sum(jnp.zeros(3).at[b["label"]].set(errors(p, b))) / rows_of(b),
    "scattered by label, largest": lambda p, b: jnp.sum(jnp.zeros(3).at[b["label"]].max(errors(p, b))) / rows_of(b),
    "scattered by label among rows": lambda p, b: jnp.mean(errors(p, b).at[b["label"]].add(1.0) ** 2),
    "scattered backwards": lambda p, b: jnp.mean(
        jnp.zeros(rows_of(b)).at[rows_of(b) - 1 - jnp.arange(rows_of(b))].set(errors(p, b)) * b["x"][:, 0]
    ),
    "one row set": of_errors(lambda e: jnp.mean(e.at[0].set(0.0))),
    "one row set by label": lambda p, b: jnp.mean(errors(p, b).at[b["label"][0]].set(0.0)),
    "class means": lambda p, b: jnp.mean(
        (jax.ops.segment_sum(b["x"], b["label"], 3) / (1 + jax.ops.segment_sum(b["mask"], b["label"], 3))[:, None] - p["w"].T) ** 2
    ),
    "beyond the end, filled": of_errors(lambda e, B: jnp.mean(e.at[jnp.arange(B) + 2].get(mode="fill", fill_value=0.0))),
    "beyond the end, clipped": of_errors(lambda e, B: jnp.mean(e.at[jnp.arange(B) + 2].get(mode="clip"))),
    "coordinates of the flat": lambda p, b: jnp.mean(jnp.stack(jnp.unravel_index(jnp.arange(rows_of(b)), (2, 32)), 1) * hidden(p, b)[:, :2]),
    "merged with features, cumulative": lambda p, b: jnp.mean(jnp.cumsum(flat(b)) * p["b"][0]),
    "merged with tokens, softmax": lambda p, b: jnp.mean(jax.nn.softmax(tokens_of(b) @ p["w"], 0) * rows_of(b) ** 2),
    "merged with tokens, sorted": lambda p, b: jnp.mean(jnp.sort(tokens_of(b), 0) * jnp.tile(p["pos"][:6], (rows_of(b), 1))),
    "merged with tokens, shifted": lambda p, b: jnp.mean(jnp.roll(tokens_of(b), 1, 0) * tokens_of(b)),
    "merged with tokens, differences": lambda p, b: jnp.mean(jnp.diff(tokens_of(b) @ p["w"], axis=0) ** 2),
    "merged with tokens, convolved": lambda p, b: jnp.mean(
        jax.lax.conv_general_dilated(tokens_of(b)[None], p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")) ** 2
    ),
    "merged with tokens, pooled by four": Case(lambda p, b: jnp.mean(
        jax.lax.reduce_window(tokens_of(b), -jnp.inf, jax.lax.max, (4, 1), (4, 1), "VALID") @ p["w"]
    ), False, 12, 4),
    "rows as channels": lambda p, b: jnp.mean(
        jax.lax.conv_general_dilated(
            b["x"].T[None], p["pos"][: rows_of(b), :3][None], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        ) ** 2
    ),
    "rows as groups of channels": lambda p, b: jnp.mean(
        jax.lax.conv_general_dilated(
            b["x"].T[None], p["pos"][None, :1, :1].repeat(rows_of(b), 2) * jnp.arange(rows_of(b)), (1,), "SAME",
            dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=rows_of(b),
        )
    ),
    "rows beside features of the same size": lambda p, b: jnp.mean((b["x"][:4].T if rows_of(b) >= 4 else b["x"]) @ p["square"] * p["pos"][:4]),
    "attention over rows": lambda p, b: jnp.mean(jax.nn.dot_product_attention(*(b["seq"].swapaxes(0, 1)[:, :, None],) * 3) ** 2),
    "attention over all tokens": lambda p, b: jnp.mean(jax.nn.softmax(tokens_of(b) @ tokens_of(b).T) @ tokens_of(b) @ p["w"] * rows_of(b)),
}) | means({
    "first features of flat rows": lambda p, b: jnp.mean(flat(b)[4 * jnp.arange(rows_of(b))] ** 2),
    "labels of flat rows": lambda p, b: jnp.mean(flat(b)[4 * jnp.arange(rows_of(b)) + b["label"]] * p["b"][0]),
    "first tokens": lambda p, b: jnp.mean(tokens_of(b)[6 * jnp.arange(rows_of(b))] @ p["w"]),
    "first half of two batches": lambda p, b: jnp.mean(jnp.concatenate([b["x"], b["x"] ** 2])[jnp.arange(rows_of(b))]),
    "number modulo the tokens": lambda p, b: jnp.mean(tokens_of(b)[:, 0] * (jnp.arange(6 * rows_of(b)) % 6)),
    "a mean times a number": lambda p, b: jnp.mean(errors(p, b)) * p["b"][0],
    "a mean less rows": of_errors(lambda e: jnp.mean(e.mean() - 2 * e)),
    "every second of two batches": lambda p, b: jnp.mean(jnp.concatenate([b["x"], 2 * b["x"] + 1])[::2] ** 2),
    "every fourth token": lambda p, b: jnp.mean(tokens_of(b)[::4] * p["scale"]),
    "eight modulo the count": lambda p, b: jnp.mean(jnp.concatenate([b["x"], b["x"]], 1)[jnp.arange(8) % rows_of(b)]),
    "wrapped around": of_errors(lambda e: jnp.mean(jnp.take(e, jnp.arange(8), mode="wrap"))),
})  # fmt: skip

BY_LENGTH = {
    "a branch on the length": Case(lambda p, b: _by_length(p, b, 6)),
    "the same below it": Case(lambda p, b: _by_length(p, b, 7), True),
    "as many tokens as rows": Case(
        lambda p, b: jnp.max(errors(p, b)) if b["seq"].shape[1] == 6 else jnp.mean(errors(p, b))
    ),
    "as wide as a piece": Case(
        lambda p, b: jnp.mean(b["x"] if b["x"].shape[0] != b["x"].shape[1] else b["x"] ** 2)
    ),
    "normed over the dim of that size": Case(
        lambda p, b: jnp.mean(jax.nn.softmax(b["x"] @ p["w"], axis=b["x"].shape.index(4)) * b["y"]),
        False,
    ),
}


def _by_length(params: Any, batch: Any, length: int) -> jax.Array:
    h = hidden(params, batch)
    return jnp.mean((h - h.mean(0)) ** 2) if batch["seq"].shape[1] >= length else jnp.mean(h**2)


def metric(value: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a loss with a metric of the errors with signs, one a row."""
    return lambda p, b: (jnp.mean(errors(p, b)), {"metric": value((hidden(p, b) - b["y"])[:, 0])})


EXTREMES = cases({
    "Max of a mean": metric(lambda r: so.losses.Max(jnp.mean(r))),
    "Max of a sum": metric(lambda r: so.losses.Max(jnp.sum(r))),
    "Max of the least": metric(lambda r: so.losses.Max(jnp.min(r))),
    "Max of a negated maximum": metric(lambda r: so.losses.Max(-jnp.max(r))),
    "Max of a maximum times minus one": metric(lambda r: so.losses.Max(-1.0 * jnp.max(r))),
    "Max of an inverse": metric(lambda r: so.losses.Max(1 / (1 + jnp.exp(jnp.max(r))))),
    "Max of an absolute maximum": metric(lambda r: so.losses.Max(jnp.abs(jnp.max(r) - 4))),
    "Max of a square of the maximum": metric(lambda r: so.losses.Max((jnp.max(r) - 2) ** 2)),
    "Max of a sine of the maximum": metric(lambda r: so.losses.Max(jnp.sin(3 * jnp.max(r)))),
    "Max of a maximum times a parameter": lambda p, b: (jnp.mean(errors(p, b)), {"m": so.losses.Max(p["b"][0] * jnp.max(b["x"]))}),
    "Max of a maximum over the count": metric(lambda r: so.losses.Max(jnp.max(r) / r.shape[0])),
    "Max of a maximum plus the count": metric(lambda r: so.losses.Max(jnp.max(r) + r.shape[0])),
    "Max of a range": metric(lambda r: so.losses.Max(jnp.max(r) - jnp.min(r))),
    "Max of ptp": metric(lambda r: so.losses.Max(jnp.ptp(r))),
    "Max of the largest less the mean": metric(lambda r: so.losses.Max(jnp.max(r) - jnp.mean(r))),
    "Max over centred rows": metric(lambda r: so.losses.Max(jnp.max(r - r.mean()))),
    "Max of the largest and the mean": metric(lambda r: so.losses.Max(jnp.minimum(jnp.max(r), jnp.mean(r)))),
    "Max of the largest or the sum": metric(lambda r: so.losses.Max(jnp.maximum(jnp.max(r), jnp.sum(r**2)))),
    "Max times a sum": metric(lambda r: so.losses.Max(jnp.max(r) * jnp.sum(r**2))),
    "Max of a second largest": metric(lambda r: so.losses.Max(jax.lax.top_k(r, 2)[0][1])),
    "Max of the first sorted": metric(lambda r: so.losses.Max(jnp.sort(r)[0])),
    "Max of the median": metric(lambda r: so.losses.Max(jnp.median(r))),
    "Max of the last row": metric(lambda r: so.losses.Max(r[-1])),
    "Max of the first rows": metric(lambda r: so.losses.Max(jnp.max(r[:2]))),
    "Max of the place of the largest": metric(lambda r: so.losses.Max(jnp.argmax(r))),
    "Max of logsumexp": metric(lambda r: so.losses.Max(jax.nn.logsumexp(r))),
    "Max of a norm": metric(lambda r: so.losses.Max(jnp.linalg.norm(r))),
    "Max of a product": metric(lambda r: so.losses.Max(jnp.prod(r))),
    "Max of a count": metric(lambda r: so.losses.Max(jnp.sum(r > 0))),
    "Max of the number of rows": metric(lambda r: so.losses.Max(r.shape[0])),
    "Max of all": metric(lambda r: so.losses.Max(jnp.all(r > -1))),
    "Max of a running sum": metric(lambda r: so.losses.Max(jnp.max(jnp.cumsum(r + 1)))),
    "Max of the largest by place": metric(lambda r: so.losses.Max(jnp.max(r * jnp.arange(r.shape[0])))),
    "Min of differences of rows": metric(lambda r: so.losses.Min(jnp.min(jnp.abs(jnp.diff(r))))),
    "Max of pairs": metric(lambda r: so.losses.Max(jnp.max(r[:, None] * jnp.sin(r)[None]))),
    "Max of class sums": lambda p, b: (
        jnp.mean(errors(p, b)), {"m": so.losses.Max(jnp.max(jax.ops.segment_sum(errors(p, b), b["label"], 3)))}
    ),
    "Max by the sign of the maximum": metric(lambda r: so.losses.Max(jnp.max(jnp.where(jnp.max(r) > 1, r, -r)))),
    "Max of mean features": lambda p, b: (jnp.mean(errors(p, b)), {"m": so.losses.Max(jnp.max(jnp.mean(hidden(p, b), 0)))}),
    "Max of a variance": metric(lambda r: so.losses.Max(jnp.var(r))),
    "Max of a scan that forgets": metric(lambda r: so.losses.Max(jax.lax.scan(lambda c, x: (jnp.maximum(0.5 * c, x), None), 0.0, r)[0])),
    "Max where the loop adds": metric(lambda r: so.losses.Max(jax.lax.scan(lambda c, x: (jnp.maximum(c, c + x), None), 0.0, r)[0])),
    "Min of a mean": metric(lambda r: so.losses.Min(jnp.mean(r))),
    "Min of the largest": metric(lambda r: so.losses.Min(jnp.max(r))),
    "Min of a negated minimum": metric(lambda r: so.losses.Min(-jnp.min(r))),
    "Min of a sum": metric(lambda r: so.losses.Min(jnp.sum(r**2))),
    "Min of any": metric(lambda r: so.losses.Min(jnp.any(r > 1))),
    "Min of the number of rows": metric(lambda r: so.losses.Min(r.shape[0])),
    "Min of a square of the minimum": metric(lambda r: so.losses.Min(jnp.min(r) ** 2)),
    "Min of the smallest over the mean": metric(lambda r: so.losses.Min(jnp.min(r) / jnp.mean(r**2))),
    "Min of an inverse": metric(lambda r: so.losses.Min(1 / (1 + jnp.exp(jnp.min(r))))),
    "Min of a root mean": metric(lambda r: so.losses.Min(jnp.sqrt(jnp.mean(r**2)))),
    "Min of the last sorted": metric(lambda r: so.losses.Min(jnp.sort(r)[-1])),
    "Sum of a mean": metric(lambda r: so.losses.Sum(jnp.mean(r))),
    "Sum of a maximum": metric(lambda r: so.losses.Sum(jnp.max(r))),
    "Sum of one": metric(lambda r: so.losses.Sum(1.0)),
    "Sum of a sum squared": metric(lambda r: so.losses.Sum(jnp.sum(r) ** 2)),
    "Sum of the count squared": metric(lambda r: so.losses.Sum(r.shape[0] ** 2)),
    "Sum of a parameter": lambda p, b: (jnp.mean(errors(p, b)), {"m": so.losses.Sum(jnp.sum(p["w"] ** 2))}),
    "Sum of whether any": metric(lambda r: so.losses.Sum(jnp.any(r > 0))),
    "Sum of places": metric(lambda r: so.losses.Sum(jnp.sum(jnp.arange(r.shape[0])))),
    "Sum of running sums": metric(lambda r: so.losses.Sum(jnp.sum(jnp.cumsum(r)))),
    "a metric that is a maximum": metric(lambda r: jnp.max(r)),
    "a metric that is a sum": metric(lambda r: jnp.sum(r)),
    "a metric that is a root": metric(lambda r: jnp.sqrt(jnp.mean(r**2))),
    "a metric that is a correlation": lambda p, b: (
        jnp.mean(errors(p, b)), {"m": jnp.corrcoef(hidden(p, b)[:, 0], b["y"][:, 0])[0, 1]}
    ),
    "a metric that is a count": metric(lambda r: r.shape[0] * 1.0),
    "a metric of rows": metric(lambda r: jnp.mean(jnp.sort(r) * jnp.linspace(0, 1, r.shape[0]))),
    "Weighted by a maximum": metric(lambda r: so.losses.Weighted(jnp.sum(r), jnp.max(r**2))),
    "Weighted maximum": metric(lambda r: so.losses.Weighted(jnp.max(r), 1.0)),
    "Weighted by one": metric(lambda r: so.losses.Weighted(jnp.sum(r), 1.0)),
    "Weighted, a root": metric(lambda r: so.losses.Weighted(jnp.sqrt(jnp.sum(r**2)), r.shape[0])),
}) | means({
    "Max of a maximum": metric(lambda r: so.losses.Max(jnp.max(r))),
    "Max of an exponential": metric(lambda r: so.losses.Max(jnp.max(jnp.exp(r)))),
    "Max of any": metric(lambda r: so.losses.Max(jnp.any(r > 0))),
    "Max of a constant": metric(lambda r: so.losses.Max(3.0)),
    "Max of an absolute": metric(lambda r: so.losses.Max(jnp.max(jnp.abs(r)))),
    "Min of a minimum": metric(lambda r: so.losses.Min(jnp.min(r))),
    "Min of a negated maximum": metric(lambda r: so.losses.Min(-jnp.max(r))),
    "Min of all": metric(lambda r: so.losses.Min(jnp.all(r > -1))),
    "Sum of a count": metric(lambda r: so.losses.Sum(jnp.sum(r > 0))),
    "Sum of the number of rows": metric(lambda r: so.losses.Sum(r.shape[0])),
})  # fmt: skip

CLASSES = {
    "arrays that grow": GROWS,
    "full size": FULL_SIZE,
    "custom_jvp rules": JVP_RULES,
    "equation parameters": EQUATION_PARAMETERS,
    "carries": CARRIES,
    "degrees": DEGREES,
    "gathers": GATHERS,
    "lengths": BY_LENGTH,
    "extremes": EXTREMES,
}
"""Class -> row -> case, for `PARAMS` and `batch_of(case.rows)`."""


def buffered(params: Any, batch: Any) -> jax.Array:
    """A buffer of columns, filled in a loop."""
    out = jnp.zeros((rows_of(batch), 6))
    for i in range(6):
        out = out.at[:, i].set(jnp.tanh(batch["seq"][:, i] @ params["scale"]))
    return jnp.mean(out**2)


def buffered_in_a_loop(params: Any, batch: Any) -> jax.Array:
    """Return the same loss under `fori_loop`."""

    def set_one(i, out):
        return out.at[:, i].set(jnp.tanh(batch["seq"][:, i] @ params["scale"]))

    return jnp.mean(jax.lax.fori_loop(0, 6, set_one, jnp.zeros((rows_of(batch), 6))) ** 2)


def buffered_by_scan(params: Any, batch: Any) -> jax.Array:
    """States of a decoder, kept in a buffer that is carried."""

    def step(carry: Any, i: Any) -> Any:
        state, out = carry
        state = jnp.tanh(state @ params["square"] + batch["seq"][:, i])
        return (state, out.at[:, i].set(state)), None

    start = jnp.zeros((rows_of(batch), 4)), jnp.zeros((rows_of(batch), 6, 4))
    return jnp.mean(jax.lax.scan(step, start, jnp.arange(6))[0][1] ** 2)


def class_token(params: Any, batch: Any) -> jax.Array:
    """A ViT's class token, as `einops.repeat(token, "d -> b 1 d")` writes it: by `jnp.tile`."""
    token = jnp.tile(params["scale"][None, None], (rows_of(batch), 1, 1))
    x = jnp.concatenate([token, batch["seq"]], axis=1) + params["pos"][:7]
    scores = jax.nn.softmax(x @ x.swapaxes(1, 2) / 2)
    return optax.softmax_cross_entropy_with_integer_labels(
        (scores @ x)[:, 0] @ params["w"], batch["label"]
    ).mean()


def unpacked(params: Any, batch: Any) -> jax.Array:
    """Queries, keys and values are unpacked from one array, which jax 0.12 unstacks."""
    h = hidden(params, batch)
    q, k, v = jnp.stack([h, 2 * h, h + 1])
    return jnp.mean((q * k + v - batch["y"]) ** 2)


def convolved(params: Any, batch: Any) -> jax.Array:
    """Two convolutions and a pool."""
    x = jax.lax.conv_general_dilated(
        batch["image"], params["pixels"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = linen.max_pool(jax.nn.relu(x), (2, 2), (2, 2)).reshape(rows_of(batch), -1)[:, :4]
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"], batch["label"]).mean()


def layer_normed(params: Any, batch: Any) -> jax.Array:
    x = batch["x"] @ params["square"]
    x = (
        (x - x.mean(-1, keepdims=True))
        * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
        * params["scale"]
    )
    return jnp.mean((x @ params["w"] + params["b"] - batch["y"]) ** 2)


def attending(params: Any, batch: Any) -> jax.Array:
    q = (batch["seq"] + params["pos"][:6]) @ params["square"]
    out = jax.nn.dot_product_attention(q[:, :, None], q[:, :, None], q[:, :, None], is_causal=True)[
        :, :, 0
    ]
    logits = out @ params["w"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"] % 3).mean()


def language_model(params: Any, batch: Any) -> so.losses.Weighted:
    tokens = batch["tokens"]
    x = params["table"][tokens] + params["pos"][: tokens.shape[1]]
    logits = jax.nn.softmax(x @ x.swapaxes(1, 2)) @ x @ params["table"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    weights = (tokens[:, 1:] > 0) * batch["mask"][:, None]
    return so.losses.Weighted(jnp.sum(losses * weights), jnp.sum(weights))


def recurrent(params: Any, batch: Any) -> jax.Array:
    def step(h, x):
        return (jnp.tanh(h @ params["square"] + x), None)

    last, _ = jax.lax.scan(step, jnp.zeros((rows_of(batch), 4)), batch["seq"].swapaxes(0, 1))
    return jnp.mean((last @ params["w"] - batch["y"]) ** 2)


def cross_entropy(params: Any, batch: Any) -> jax.Array:
    log_p = jax.nn.log_softmax(batch["x"] @ params["w"] + params["b"])
    return -jnp.mean(log_p[jnp.arange(log_p.shape[0]), batch["label"]])


class _Mlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(linen.LayerNorm()(linen.gelu(linen.Dense(8)(x))))


def of_linen(_: Any, batch: Any) -> jax.Array:
    model = _Mlp()
    params = model.init(jax.random.key(0), jnp.ones((1, 4)))
    params = jax.tree.map(lambda x: x + _["b"][0], params)
    return jnp.mean((model.apply(params, batch["x"]) - batch["y"]) ** 2)


def of_nnx(params: Any, batch: Any) -> jax.Array:
    layer = nnx.Linear(4, 3, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    layer.kernel[...], layer.bias[...] = params["w"], params["b"]
    norm = nnx.LayerNorm(3, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    return optax.softmax_cross_entropy_with_integer_labels(
        norm(nnx.gelu(layer(batch["x"]))), batch["label"]
    ).mean()


def equinox_mlp(params: Any, batch: Any) -> jax.Array:
    net = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))
    net = jax.tree.map(lambda x: x + params["b"][0] if eqx.is_inexact_array(x) else x, net)
    return jnp.mean((jax.vmap(net)(batch["x"]) - batch["y"]) ** 2)


ORDINARY = {
    "mean of errors": lambda p, b: jnp.mean(errors(p, b)),
    "sum over the count": lambda p, b: jnp.sum(errors(p, b)) / rows_of(b),
    "masked": lambda p, b: so.losses.Weighted(jnp.sum(errors(p, b) * b["mask"]), jnp.sum(b["mask"])),
    "decayed": lambda p, b: jnp.mean(errors(p, b)) + 1e-2 * sum(jnp.sum(w**2) for w in jax.tree.leaves(p)),
    "vmapped": lambda p, b: jnp.mean(jax.vmap(lambda x, y: jnp.sum((jnp.tanh(x @ p["w"]) - y) ** 2))(b["x"], b["y"])),
    "two means": lambda p, b: jnp.mean(errors(p, b)) + 0.1 * jnp.mean(hidden(p, b) ** 2),
    "diagonals": lambda p, b: jnp.mean(errors(p, b)) + jnp.sum(jnp.diag(p["square"]) ** 2),
    "with metrics": lambda p, b: (jnp.mean(errors(p, b)), {
        "accuracy": jnp.mean(hidden(p, b).argmax(-1) == b["label"]),
        "seen": so.losses.Sum(jnp.sum(b["mask"])),
        "largest": so.losses.Max(jnp.max(errors(p, b))),
        "by feature": jnp.mean(hidden(p, b), 0),
        "of masked": so.losses.Weighted(jnp.sum(errors(p, b) * b["mask"]), jnp.sum(b["mask"])),
    }),
    "cross entropy": cross_entropy,
    "one hot": lambda p, b: optax.softmax_cross_entropy(b["x"] @ p["w"], jax.nn.one_hot(b["label"], 3)).mean(),
    "layer norm": layer_normed,
    "attention": attending,
    "language model": language_model,
    "recurrent": recurrent,
    "convolution": convolved,
    "linen": of_linen,
    "nnx": of_nnx,
    "equinox": equinox_mlp,
    "checkpointed": lambda p, b: jax.checkpoint(layer_normed)(p, b),
    "sums by scan": lambda p, b: jax.lax.scan(lambda c, e: (c + e, None), 0.0, errors(p, b))[0] / rows_of(b),
    "row by row": lambda p, b: jnp.mean(jax.lax.map(lambda r: jnp.mean((jnp.tanh(r[0] @ p["w"]) - r[1]) ** 2), (b["x"], b["y"]))),
    "buffer": buffered,
    "buffer in fori_loop": buffered_in_a_loop,
    "buffer in scan": buffered_by_scan,
    "class token": class_token,
    "unpacked": unpacked,
}  # fmt: skip
ACCEPTED = means(ORDINARY)
ACCEPTED |= {f"one row each: {name}": Case(loss, True, 4, 4) for name, loss in ORDINARY.items()}
ACCEPTED |= {f"four pieces: {name}": Case(loss, True, 12, 4) for name, loss in ORDINARY.items()}
"""Row -> case that must be accepted."""
