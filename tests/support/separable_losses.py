"""Losses that are (weighted) means over rows, as people write them."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import shardopt as so
from shardopt.models import gpt
from support.host import host_params

KEY = jax.random.key(0)
DRAW = np.random.default_rng(0)
F = np.float32


def normal(*shape):
    return DRAW.normal(size=shape).astype(F)


ROWS = 16
BATCH = {
    "x": normal(ROWS, 12),
    "y": normal(ROWS, 5),
    "label": DRAW.integers(0, 5, ROWS),
    "mask": (DRAW.uniform(size=ROWS) < 0.6).astype(F),
    "image": normal(ROWS, 8, 8, 3),
    "tokens": DRAW.integers(0, 12, (ROWS, 7)),
    "length": DRAW.integers(1, 8, ROWS),
    "series": normal(ROWS, 7, 12),
    "other": normal(ROWS, 12),
}
NETWORK = {"up": normal(12, 16), "bias": normal(16), "down": normal(16, 5)}


def forward(params, x):
    return jnp.tanh(x @ params["up"] + params["bias"][None, :]) @ params["down"]


def errors(params, batch):
    return ((forward(params, batch["x"]) - batch["y"]) ** 2).mean(-1)


def mean_squared(params, batch):
    return errors(params, batch).mean()


def by_hand(params, batch):
    return jnp.sum(errors(params, batch)) / batch["x"].shape[0]


def weighted(params, batch):
    return so.losses.Weighted((errors(params, batch) * batch["mask"]).sum(), batch["mask"].sum())


def decayed(params, batch):
    return mean_squared(params, batch) + 1e-3 * sum(
        jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)
    )


def half_precision(params, batch):
    params, x = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, batch["x"]))
    return ((forward(params, x) - batch["y"].astype(jnp.bfloat16)) ** 2).mean()


def classified(params, batch):
    log_p = jax.nn.log_softmax(forward(params, batch["x"]))
    loss = -log_p[jnp.arange(log_p.shape[0]), batch["label"]].mean()
    right = log_p.argmax(-1) == batch["label"]
    return loss, {
        "accuracy": jnp.mean(right),
        "share": jnp.mean(right.astype(jnp.float32)),
        "of_masked": so.losses.Weighted((right * batch["mask"]).sum(), batch["mask"].sum()),
        "by_class": jnp.mean(jax.nn.softmax(forward(params, batch["x"])), 0),
        "rate": 0.1,
    }


def along_axis(params, batch):
    log_p = jax.nn.log_softmax(forward(params, batch["x"]))
    return -jnp.take_along_axis(log_p, batch["label"][:, None], axis=1).mean()


def one_hot(params, batch):
    target = optax.smooth_labels(jax.nn.one_hot(batch["label"], 5), 0.1)
    return optax.softmax_cross_entropy(forward(params, batch["x"]), target).mean()


def integer_labels(params, batch):
    logits = forward(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def vmapped(params, batch):
    def one(x, y):
        return jnp.mean((jnp.tanh(params["up"].T @ x + params["bias"]) @ params["down"] - y) ** 2)

    return jax.vmap(one)(batch["x"], batch["y"]).mean()


def vmapped_lookup(params, batch):
    def one(x, label):
        out = forward(params, x[None])[0]
        return optax.huber_loss(out[label], jnp.sort(out)[-2]) + out.at[label].set(0.0).sum()

    return jnp.mean(jax.vmap(one)(batch["x"], batch["label"]))


def one_after_another(params, batch):
    return jax.lax.map(
        lambda row: errors(params, jax.tree.map(lambda x: x[None], row))[0], batch
    ).mean()


def summed_by_scan(params, batch):
    def body(total, row):
        return total + errors(params, jax.tree.map(lambda x: x[None], row))[0], None

    return jax.lax.scan(body, 0.0, {"x": batch["x"], "y": batch["y"]})[0] / len(batch["x"])


def per_row_gradient(params, batch):
    def one(x, y):
        inner = jax.grad(lambda p: jnp.mean((forward(p, x[None])[0] - y) ** 2))(params)
        moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, inner)
        return jnp.mean((forward(moved, x[None])[0] - y[::-1]) ** 2)

    return jax.vmap(one)(batch["x"], batch["y"]).mean()


def gradient_penalty(params, batch):
    slope = jax.grad(lambda x: forward(params, x).sum())(batch["x"])
    return mean_squared(params, batch) + jnp.mean((jnp.linalg.norm(slope, axis=-1) - 1) ** 2)


def divergence(params, batch):
    jacobian = jax.vmap(jax.jacfwd(lambda x: forward(params, x[None])[0]))(batch["x"])
    return jnp.mean(jnp.trace(jacobian[:, :5, :5], axis1=1, axis2=2)) + jnp.mean(jacobian**2)


def dropout(params, batch, rng=None):
    hidden = jnp.tanh(batch["x"] @ params["up"])
    if rng is not None:
        hidden = hidden * jax.random.bernoulli(rng, 0.7, hidden.shape) / 0.7
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def diffusion(params, batch, rng=None):
    time_key, noise_key = jax.random.split(jax.random.key(0) if rng is None else rng)
    if rng is None:
        return mean_squared(params, batch)
    time = jax.random.uniform(time_key, (batch["x"].shape[0], 1))
    noise = jax.random.normal(noise_key, batch["x"].shape)
    return jnp.mean(
        (forward(params, jnp.sqrt(time) * batch["x"] + jnp.sqrt(1 - time) * noise) - batch["y"])
        ** 2
    )


def keys_of_rows(params, batch, rng=None):
    if rng is None:
        return mean_squared(params, batch)
    keys = jax.random.split(rng, batch["x"].shape[0])
    noise = jax.vmap(lambda key: jax.random.normal(key, (12,)))(keys)
    return jnp.mean((forward(params, batch["x"] + noise) - batch["y"]) ** 2)


def two_batches(params, batch):
    both = forward(params, jnp.concatenate([batch["x"], batch["other"]]))
    real, fake = jnp.split(both, 2)
    return jax.nn.softplus(-real).mean() + jax.nn.softplus(fake).mean()


def preferences(params, batch):
    both = forward(params, jnp.concatenate([batch["x"], batch["other"]], axis=0)).sum(-1)
    chosen = both[: len(batch["x"])]
    rejected = both[len(batch["x"]) :]
    margin = chosen - rejected
    return -jax.nn.log_sigmoid(margin).mean(), {
        "margin": margin.mean(),
        "accuracy": (margin > 0).mean(),
    }


def low_rank(params, batch):
    base = jax.lax.stop_gradient(params)
    return mean_squared({**base, "up": base["up"] + params["up"][:, :2] @ params["up"][:2]}, batch)


def looped(params, batch):
    def one(x):
        return jax.lax.while_loop(
            lambda c: (c[0] < 5) & (jnp.sum(c[1] ** 2) > 0.1),
            lambda c: (c[0] + 1, c[1] * 0.5),
            (0, x),
        )[1]

    halved = jax.lax.stop_gradient(jax.vmap(one)(batch["x"]))
    return jnp.mean((forward(params, halved) - batch["y"]) ** 2)


def branched(params, batch):
    def one(x):
        return jax.lax.cond(x[0] > 0, jnp.sin, lambda x: x * 2, x)

    return jnp.mean((forward(params, jax.vmap(one)(batch["x"])) - batch["y"]) ** 2)


def checkpointed(params, batch):
    return jax.checkpoint(mean_squared)(params, batch)


@jax.custom_vjp
def guarded_gradient(x):
    return x


guarded_gradient.defvjp(
    lambda x: (x, None), lambda _, ct: (0.5 * jnp.where(jnp.isfinite(ct), ct, 0),)
)


def custom_backward(params, batch):
    return jnp.mean((guarded_gradient(forward(params, batch["x"])) - batch["y"]) ** 2)


def straight_through(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"])
    distance = jnp.sum((hidden[:, None, :] - params["down"].T[None]) ** 2, -1)
    code = params["down"].T[distance.argmin(-1)]
    hidden = hidden + jax.lax.stop_gradient(code - hidden)
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2) + jnp.mean((code - hidden) ** 2)


def auxiliary_mean_inside(params, batch):
    penalty = jnp.mean(jnp.tanh(batch["x"] @ params["up"]) ** 2)
    return jnp.mean(errors(params, batch) + 0.1 * penalty)


def finite_or_zero(params, batch):
    error_values = errors(params, batch)
    return jnp.where(jnp.isfinite(error_values), error_values, 0.0).mean()


def recurrent(params, batch):
    def step(hidden, x):
        hidden = jnp.tanh(x @ params["up"] + hidden)
        return hidden, hidden @ params["down"]

    start = jnp.zeros((batch["series"].shape[0], 16))
    _, outs = jax.lax.scan(step, start, batch["series"].swapaxes(0, 1))
    counts = (jnp.arange(7)[:, None] < batch["length"][None, :]).astype(jnp.float32)
    return so.losses.Weighted(jnp.sum((outs**2).mean(-1) * counts), jnp.sum(counts))


def embedded(params, batch):
    tokens = batch["tokens"]
    x = params["up"][tokens] + params["bias"][None, None, :]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = (x + params["down"].T[positions % 5]).reshape(-1, 16)
    log_p = jax.nn.log_softmax(x @ params["up"].T)
    target = jnp.roll(tokens, -1, 1).reshape(-1)
    return -jnp.mean(log_p[jnp.arange(target.shape[0]), target])


def attention(params, batch):
    x = batch["series"] @ params["up"]
    q, k, v = (x.reshape(*x.shape[:2], 4, 4) for _ in range(3))
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    scores = jnp.where(jnp.tril(jnp.ones((7, 7), bool)), scores, -1e9)
    out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(x.shape)
    out = out + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    return jnp.mean(out**2)


def pooled(params, batch):
    def one(image):
        return jnp.stack(
            [
                jnp.median(image),
                jnp.linalg.norm(image),
                jnp.fft.fft(image[:, 0, 0]).real[1],
                image[::-1].max(),
            ]
        )

    return jnp.mean(jax.vmap(one)(batch["image"]) @ params["up"][:4])


def linear_algebra(params, batch):
    x = jnp.einsum("bti,bsi->bts", batch["series"], batch["series"]) + 0.1 * jnp.eye(7)[None]
    solved = jnp.linalg.solve(x, batch["series"])
    return jnp.mean(solved @ params["up"]) + jnp.mean(jnp.linalg.slogdet(x)[1])


def segments(params, batch):
    summed = jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids, 12))(
        batch["series"], batch["tokens"]
    )
    return jnp.mean((summed @ params["up"][:, :5]) ** 2)


class _Cnn(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Conv(8, (3, 3))(x))
        x = linen.max_pool(x, (2, 2), (2, 2))
        x = linen.relu(linen.Conv(8, (3, 3), feature_group_count=8)(x))
        x = linen.GroupNorm(4)(linen.avg_pool(x, (2, 2), (2, 2)))
        return linen.Dense(5)(x.reshape(x.shape[0], -1))


class _Block(linen.Module):
    @linen.compact
    def __call__(self, x, deterministic=True):
        y = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(2, dropout_rate=0.1)(
            y, mask=linen.make_causal_mask(x[..., 0]), deterministic=deterministic
        )
        y = linen.Dense(24)(linen.LayerNorm()(x))
        return x + linen.Dropout(0.1)(linen.Dense(12)(linen.gelu(y)), deterministic=deterministic)


class _Transformer(linen.Module):
    @linen.compact
    def __call__(self, x, deterministic=True):
        for _ in range(2):
            x = linen.remat(_Block, static_argnums=(2,))()(x, deterministic)
        return linen.Dense(5)(x.mean(1))


def of_linen(net, field):
    params = net.init(KEY, BATCH[field][:2])

    def loss(params, batch, rng=None):
        kwargs = (
            {}
            if rng is None or field == "image"
            else {"deterministic": False, "rngs": {"dropout": rng}}
        )
        out = net.apply(params, batch[field], **kwargs)
        return optax.softmax_cross_entropy_with_integer_labels(out, batch["label"]).mean()

    return params, loss


def of_nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(12, 16, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, 16, rngs=rngs, decode=False)
            self.norm = nnx.LayerNorm(16, rngs=rngs)
            self.out = nnx.Linear(16, 12, rngs=rngs)

        def __call__(self, tokens):
            x = self.embed(tokens)
            x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(tokens))
            return self.out(x)

    graph, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)

    def loss(params, batch):
        logits = nnx.merge(graph, params)(batch["tokens"][:, :-1])
        per_token = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
        mask = batch["tokens"][:, 1:] > 2
        return so.losses.Weighted((per_token * mask).sum(), mask.sum())

    return params, loss


def of_equinox():
    class Net(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm
        cell: eqx.nn.GRUCell
        out: eqx.nn.MLP

        def __init__(self, key):
            keys = jax.random.split(key, 3)
            self.attention = eqx.nn.MultiheadAttention(2, 12, key=keys[0])
            self.norm = eqx.nn.LayerNorm(12)
            self.cell = eqx.nn.GRUCell(12, 8, key=keys[2])
            self.out = eqx.nn.MLP(8, 5, 16, 1, key=keys[1])

        def __call__(self, x):
            x = x + self.attention(*(jax.vmap(self.norm)(x),) * 3)
            last, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(8), x)
            return self.out(last)

    params, static = eqx.partition(Net(KEY), eqx.is_array)

    def loss(params, batch):
        out = jax.vmap(eqx.combine(params, static))(batch["series"])
        return optax.softmax_cross_entropy_with_integer_labels(out, batch["label"]).mean()

    return params, loss


def of_haiku():
    def net(x):
        y = hk.LayerNorm(-1, True, True)(x)
        x = x + hk.MultiHeadAttention(
            2, 6, w_init=hk.initializers.VarianceScaling(1.0), model_size=12
        )(y, y, y)
        return hk.Linear(5)(
            hk.dynamic_unroll(hk.LSTM(8), x.swapaxes(0, 1), hk.LSTM(8).initial_state(x.shape[0]))[
                0
            ][-1]
        )

    net = hk.without_apply_rng(hk.transform(net))
    params = net.init(KEY, BATCH["series"][:2])

    def loss(params, batch):
        return optax.softmax_cross_entropy_with_integer_labels(
            net.apply(params, batch["series"]), batch["label"]
        ).mean()

    return params, loss


def of_gpt(weighted):
    config = gpt.config(vocab_size=12, dim=16, num_layers=2, num_heads=4, max_length=16)
    model = gpt.model(config)

    def loss(params, batch):
        weights = (
            {"weights": jnp.broadcast_to(batch["mask"][:, None], (len(batch["mask"]), 6))}
            if weighted
            else {}
        )
        return model.loss_fn(params, {"tokens": batch["tokens"], **weights})

    return host_params(gpt.init, config), loss


PLAIN = [mean_squared, by_hand, weighted, decayed, half_precision, classified, along_axis, one_hot, integer_labels, vmapped,
         vmapped_lookup, one_after_another, summed_by_scan, per_row_gradient, gradient_penalty, divergence, dropout, diffusion,
         keys_of_rows, two_batches, preferences, low_rank, looped, branched, checkpointed, custom_backward, straight_through,
         auxiliary_mean_inside, finite_or_zero, recurrent, embedded, attention, pooled, linear_algebra, segments]  # fmt: skip

SEPARABLE = {
    **{loss.__name__: lambda loss=loss: (NETWORK, loss) for loss in PLAIN},
    "linen_cnn": lambda: of_linen(_Cnn(), "image"),
    "linen_transformer": lambda: of_linen(_Transformer(), "series"),
    "nnx_transformer": of_nnx,
    "equinox": of_equinox,
    "haiku": of_haiku,
    "gpt": lambda: of_gpt(False),
    "gpt_weighted": lambda: of_gpt(True),
}
"""Name -> `() -> (params, loss_fn)`, for `BATCH`."""
