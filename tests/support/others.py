"""Models of other libraries with the losses that their users write: parameters, loss and batches of
each.

Each library is imported where its model is made.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so

ROWS = 16


class Case(NamedTuple):
    """A model in training.

    Attributes:
      params: the parameters.
      loss_fn: the loss.
      make_batch: `make_batch(draw) -> batch` of 16 rows.
      rules: rules that freeze the leaves that are not trained.
      mixing: whether rows mix, so that only the global view can have it.
      constrained: whether it says itself how rows are split, which only the global view lets it.
      waits: whether a loop runs until its last row is done. No rule says that the turns after a
        row's last one change nothing, so only the global view has it.
    """

    params: Any
    loss_fn: Callable[..., Any]
    make_batch: Callable[[np.random.Generator], Any]
    rules: tuple[tuple[str, str], ...] = ()
    mixing: bool = False
    constrained: bool = False
    waits: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Return the options that a strategy takes for it."""
        needs_all_rows = self.mixing or self.constrained or self.waits
        return {"rules": self.rules} | ({"view": "global"} if needs_all_rows else {})

    def batches(self, steps: int) -> list[Any]:
        """Return as many batches, floats as float32."""
        draw = np.random.default_rng(11)

        def single(x):
            return x.astype(np.float32) if x.dtype == np.float64 else x

        return [jax.tree.map(single, self.make_batch(draw)) for _ in range(steps)]


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def images(draw):
    scale = np.linspace(0.3, 2.0, ROWS)[:, None, None, None]
    return {"image": scale * draw.normal(size=(ROWS, 8, 8, 3)), "label": draw.integers(0, 4, ROWS)}


def tokens(draw):
    return {"tokens": draw.integers(0, 16, (ROWS, 9))}


def next_token(apply):
    def loss_fn(params, batch):
        return cross_entropy(apply(params, batch["tokens"][:, :-1]), batch["tokens"][:, 1:])

    return loss_fn


def linen_resnet():
    """Batch norm in a mutable collection, as in flax's ImageNet example."""
    from flax import linen as nn

    class Block(nn.Module):
        width: int

        @nn.compact
        def __call__(self, x, train):
            def norm():
                return nn.BatchNorm(use_running_average=not train, momentum=0.9)

            y = nn.relu(norm()(nn.Conv(self.width, (3, 3), use_bias=False)(x)))
            y = norm()(nn.Conv(self.width, (3, 3), use_bias=False)(y))
            return nn.relu(nn.Conv(self.width, (1, 1))(x) + y)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            for width in (8, 16):
                x = Block(width)(x, train)
            return nn.Dense(4)(x.mean((1, 2)))

    model = ResNet()

    def loss_fn(variables, batch, rng=None):
        train = rng is not None
        logits, new = model.apply(variables, batch["image"], train, mutable=["batch_stats"])
        accuracy = jnp.mean(logits.argmax(-1) == batch["label"])
        aux = {"accuracy": accuracy} | ({"stats": so.losses.Updated(new)} if train else {})
        return cross_entropy(logits, batch["label"]), aux

    variables = jax.jit(lambda key: model.init(key, jnp.zeros((1, 8, 8, 3)), False))(
        jax.random.key(0)
    )
    return Case(variables, loss_fn, images, rules=(("^batch_stats/", "frozen"),), mixing=True)


def nnx_cnn():
    """Batch norm and dropout with Rngs, as in the first pages of flax nnx."""
    from flax import nnx

    class CNN(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.linear = nnx.Linear(128, 4, rngs=rngs)

        def __call__(self, x):
            x = nnx.avg_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), strides=(2, 2))
            return self.linear(self.dropout(x.reshape(x.shape[0], -1)))

    def loss(model, batch):
        return cross_entropy(model(batch["image"]), batch["label"])

    params, loss_fn, rules = so.interop.nnx(CNN(nnx.Rngs(0)), loss)
    return Case(params, loss_fn, images, rules, mixing=True)


def linen_transformer():
    """Logical axes on activations and parameters."""
    from flax import linen as nn

    def dense(width, names):
        return nn.Dense(
            width, kernel_init=nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
        )

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(16, 16)(tokens)
            x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
            y = nn.MultiHeadDotProductAttention(2)(
                nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens)
            )
            x = nn.with_logical_constraint(x + y, ("batch", "length", "embed"))
            x = x + dense(16, ("mlp", "embed"))(
                nn.relu(dense(32, ("embed", "mlp"))(nn.LayerNorm()(x)))
            )
            return dense(16, ("embed", "vocab"))(
                nn.with_logical_constraint(x, ("batch", "length", "embed"))
            )

    model = Transformer()
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))

    def apply(params, tokens):
        rules = (
            ("batch", "data"),
            ("length", None),
            ("embed", None),
            ("mlp", None),
            ("vocab", None),
        )
        with nn.logical_axis_rules(rules):
            return model.apply(params, tokens)

    return Case(nn.unbox(variables), next_token(apply), tokens, constrained=True)


def equinox_vit():
    """A module of arrays and functions, vmapped over the batch."""
    import equinox as eqx

    class ViT(eqx.Module):
        embed: eqx.nn.Linear
        positions: jax.Array
        attention: eqx.nn.MultiheadAttention
        norms: list[eqx.nn.LayerNorm]
        mlp: eqx.nn.MLP
        head: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 5)
            self.embed = eqx.nn.Linear(48, 16, key=keys[0])
            self.positions = jax.random.normal(keys[1], (4, 16)) * 0.1
            self.attention = eqx.nn.MultiheadAttention(2, 16, key=keys[2])
            self.norms = [eqx.nn.LayerNorm(16), eqx.nn.LayerNorm(16)]
            self.mlp = eqx.nn.MLP(16, 16, 32, 1, key=keys[3])
            self.head = eqx.nn.Linear(16, 4, key=keys[4])

        def __call__(self, image):
            patches = image.reshape(2, 4, 2, 4, 3).transpose(0, 2, 1, 3, 4).reshape(4, 48)
            x = jax.vmap(self.embed)(patches) + self.positions
            y = jax.vmap(self.norms[0])(x)
            x = x + self.attention(y, y, y)
            x = x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
            return self.head(x.mean(0))

    params, static = eqx.partition(ViT(jax.random.key(0)), eqx.is_inexact_array)

    def loss_fn(params, batch):
        return cross_entropy(jax.vmap(eqx.combine(params, static))(batch["image"]), batch["label"])

    return Case(params, loss_fn, images)


def equinox_batch_norm():
    """`eqx.nn.State`, threaded through a vmapped call."""
    import equinox as eqx

    class Net(eqx.Module):
        up: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        down: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key)
            self.up = eqx.nn.Linear(12, 16, key=keys[0])
            self.down = eqx.nn.Linear(16, 4, key=keys[1])
            self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")

        def __call__(self, x, state):
            x, state = self.norm(self.up(x), state)
            return self.down(jax.nn.relu(x)), state

    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(variables, batch):
        model = eqx.combine(variables["params"], static)
        run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, new = run(batch["x"], variables["state"])
        return cross_entropy(logits, batch["label"]), {"stats": so.losses.Updated({"state": new})}

    return Case(
        {"params": params, "state": state},
        loss_fn,
        vectors,
        rules=(("^state/", "frozen"),),
        mixing=True,
    )


def vectors(draw):
    scale = np.linspace(0.3, 2.0, ROWS)[:, None]
    return {"x": scale * draw.normal(size=(ROWS, 12)), "label": draw.integers(0, 4, ROWS)}


def haiku_transformer():
    params, apply = _haiku_transformer()
    return Case(params, next_token(apply), tokens)


def _haiku_transformer():
    import haiku as hk

    def forward(tokens):
        x = hk.Embed(16, 16)(tokens)
        mask = jnp.tril(jnp.ones((1, 1, tokens.shape[1], tokens.shape[1])))
        for _ in range(2):

            def norm():
                return hk.LayerNorm(-1, True, True)

            y = norm()(x)
            x = x + hk.MultiHeadAttention(
                2, 8, w_init=hk.initializers.VarianceScaling(1.0), model_size=16
            )(y, y, y, mask)
            x = x + hk.nets.MLP([32, 16])(norm()(x))
        return hk.Linear(16)(x)

    model = hk.without_apply_rng(hk.transform(forward))
    return jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32)), model.apply


def haiku_batch_norm():
    """The model uses `transform_with_state`, and dropout by the key of the step."""
    import haiku as hk

    def forward(x, training):
        x = hk.BatchNorm(True, True, 0.9)(hk.Linear(16)(x), is_training=training)
        x = jax.nn.relu(x)
        return hk.Linear(4)(hk.dropout(hk.next_rng_key(), 0.1, x) if training else x)

    model = hk.transform_with_state(forward)
    params, state = model.init(jax.random.key(0), jnp.zeros((1, 12)), True)

    def loss_fn(variables, batch, rng=None):
        training = rng is not None
        logits, new = model.apply(
            variables["params"], variables["state"], rng, batch["x"], training
        )
        aux = {"stats": so.losses.Updated({"state": new})} if training else {}
        return cross_entropy(logits, batch["label"]), aux

    return Case(
        {"params": params, "state": state},
        loss_fn,
        vectors,
        rules=(("^state/", "frozen"),),
        mixing=True,
    )


def keras_stateless():
    """`stateless_call`: lists of trainable and other variables, among them statistics and seeds."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(16, kernel_initializer=keras.initializers.GlorotUniform(seed=1)),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dropout(0.1, seed=2),
            layers.Dense(4, kernel_initializer=keras.initializers.GlorotUniform(seed=3)),
        ]
    )
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss_fn(variables, batch):
        logits, other = model.stateless_call(
            variables["trainable"], variables["other"], batch["x"], training=True
        )
        return entropy(batch["label"], logits), {"stats": so.losses.Updated({"other": other})}

    def values(variables):
        return [variable.value for variable in variables]

    params = {
        "trainable": values(model.trainable_variables),
        "other": values(model.non_trainable_variables),
    }
    return Case(params, loss_fn, vectors, rules=(("^other/", "frozen"),), mixing=True)


def jraph_graphs():
    """Padded graphs, stacked: each row of the batch is some graphs in one, as jraph's own pmap
    example has them.
    """
    import jraph

    def graph(draw, nodes):
        edges = 2 * nodes
        return jraph.GraphsTuple(
            nodes=draw.normal(size=(nodes, 5)),
            edges=draw.normal(size=(edges, 2)),
            senders=draw.integers(0, nodes, edges),
            receivers=draw.integers(0, nodes, edges),
            globals=draw.normal(size=(1, 1)),
            n_node=np.array([nodes]),
            n_edge=np.array([edges]),
        )

    def make_batch(draw):
        rows = [
            jraph.batch_np([graph(draw, n) for n in draw.integers(2, 5, 2)]) for _ in range(ROWS)
        ]
        rows = [jraph.pad_with_graphs(row, 10, 20, 3) for row in rows]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)

    def forward(params, graph):
        def dense(name):
            return jraph.concatenated_args(lambda x: jnp.tanh(x @ params[name]))

        network = jraph.GraphNetwork(dense("edge"), dense("node"), dense("global"))
        return network(graph).globals

    def loss_fn(params, batch):
        def of_row(graph):
            prediction = forward(params, graph._replace(globals=jnp.zeros_like(graph.globals)))
            mask = jraph.get_graph_padding_mask(graph)
            return jnp.sum(mask * (prediction.sum(-1) - graph.globals[:, 0]) ** 2), jnp.sum(mask)

        totals, counts = jax.vmap(of_row)(batch)
        return so.losses.Weighted(totals.sum(), counts.sum())

    draw = np.random.default_rng(0)
    sizes = {"edge": (2 + 5 + 5 + 1, 8), "node": (5 + 8 + 8 + 1, 8), "global": (8 + 8 + 1, 8)}
    params = {
        name: (draw.normal(size=size) * 0.3).astype(np.float32) for name, size in sizes.items()
    }
    return Case(params, loss_fn, make_batch)


def diffrax_ode():
    """A neural ODE with the default adjoint, adaptive steps and diffrax's own checks of errors,
    vmapped.
    """
    import diffrax
    import equinox as eqx

    field = eqx.nn.MLP(2, 2, 8, 1, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(field, eqx.is_inexact_array)

    def loss_fn(params, batch):
        field = eqx.combine(params, static)

        def solve(start):
            return diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: field(y)),
                diffrax.Tsit5(),
                t0=0.0,
                t1=1.0,
                dt0=0.1,
                y0=start,
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-3),
                max_steps=16,
            ).ys[0]

        return jnp.mean((jax.vmap(solve)(batch["x"]) - batch["y"]) ** 2)

    def make(draw):
        return {"x": draw.normal(size=(ROWS, 2)), "y": draw.normal(size=(ROWS, 2))}

    return Case(params, loss_fn, make, waits=True)


def ppo():
    """Advantages normalised over the batch, entropy and value terms, as brax and purejaxrl have
    them.
    """
    from flax import linen as nn

    class ActorCritic(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.tanh(nn.Dense(16)(x))
            return nn.Dense(4)(x), nn.Dense(1)(x)[:, 0]

    model = ActorCritic()

    def make_batch(draw):
        rows = vectors(draw)
        rows |= {name: draw.normal(size=ROWS) for name in ("advantage", "target", "old_value")}
        return rows | {
            "old_log_prob": draw.uniform(-2.0, -1.0, ROWS),
            "advantage": 3 + draw.normal(size=ROWS),
        }

    def loss_fn(params, batch):
        logits, value = model.apply(params, batch["x"])
        log_probs = jax.nn.log_softmax(logits)
        log_prob = jnp.take_along_axis(log_probs, batch["label"][:, None], 1)[:, 0]
        ratio = jnp.exp(log_prob - batch["old_log_prob"])
        advantage = (batch["advantage"] - batch["advantage"].mean()) / (
            batch["advantage"].std() + 1e-8
        )
        policy = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage).mean()
        clipped = batch["old_value"] + jnp.clip(value - batch["old_value"], -0.2, 0.2)
        errors = jnp.maximum((value - batch["target"]) ** 2, (clipped - batch["target"]) ** 2)
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, -1).mean()
        return policy + 0.5 * errors.mean() - 0.01 * entropy, {"entropy": entropy}

    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 12), np.float32))
    return Case(params, loss_fn, make_batch, mixing=True)


def clip():
    """Two towers and in-batch negatives."""
    from flax import linen as nn

    class CLIP(nn.Module):
        @nn.compact
        def __call__(self, image, text):
            image = nn.Dense(8)(nn.relu(nn.Dense(16)(image)))
            text = nn.Dense(8)(nn.relu(nn.Dense(16)(text)))
            image, text = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (image, text))
            return image @ text.T * jnp.exp(self.param("scale", nn.initializers.constant(1.0), ()))

    model = CLIP()

    def loss_fn(params, batch):
        logits = model.apply(params, batch["image"], batch["text"])
        pairs = jnp.arange(logits.shape[0])
        return (cross_entropy(logits, pairs) + cross_entropy(logits.T, pairs)) / 2

    def make(draw):
        return {"image": draw.normal(size=(ROWS, 12)), "text": draw.normal(size=(ROWS, 10))}

    inputs = np.zeros((1, 12), np.float32), np.zeros((1, 10), np.float32)
    params = jax.jit(model.init)(jax.random.key(0), *inputs)
    return Case(params, loss_fn, make, mixing=True)


def lora():
    """Adapters on frozen weights."""
    draw = np.random.default_rng(0)

    def normal(*shape):
        return (draw.normal(size=shape) * 0.3).astype(np.float32)

    params = {
        "base": {"up": normal(12, 16), "down": normal(16, 4)},
        "lora": {
            "up": {"a": normal(12, 2), "b": np.zeros((2, 16), np.float32)},
            "down": {"a": normal(16, 2), "b": normal(2, 4)},
        },
    }

    def loss_fn(params, batch):
        weights = {
            k: w + params["lora"][k]["a"] @ params["lora"][k]["b"]
            for k, w in params["base"].items()
        }
        return cross_entropy(
            jax.nn.gelu(batch["x"] @ weights["up"]) @ weights["down"], batch["label"]
        )

    return Case(params, loss_fn, vectors, rules=(("^base/", "frozen"),))


def dpo():
    """A policy and the frozen one that it started from, on pairs of a chosen and a rejected answer."""
    start, apply = _haiku_transformer()

    def log_prob(params, tokens):
        log_probs = jax.nn.log_softmax(apply(params, tokens[:, :-1]))
        return jnp.take_along_axis(log_probs, tokens[:, 1:, None], 2)[:, :, 0].sum(1)

    def loss_fn(params, batch):
        policy, reference = (
            log_prob(params[role], batch["chosen"]) - log_prob(params[role], batch["rejected"])
            for role in ("policy", "reference")
        )
        margin = 0.1 * (policy - jax.lax.stop_gradient(reference))
        return -jax.nn.log_sigmoid(margin).mean(), {"accuracy": jnp.mean(margin > 0)}

    def make(draw):
        return {name: draw.integers(0, 16, (ROWS, 9)) for name in ("chosen", "rejected")}

    return Case(
        {"policy": start, "reference": start}, loss_fn, make, rules=(("^reference/", "frozen"),)
    )


def maml_of_tasks():
    """Rows are tasks, each with a gradient step of its own: a mean over rows."""
    draw = np.random.default_rng(0)
    params = {
        "w": (draw.normal(size=(3, 8)) * 0.5).astype(np.float32),
        "v": (draw.normal(size=8) * 0.5).astype(np.float32),
    }

    def errors(params, x, y):
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)

    def of_task(params, task):
        grads = jax.grad(errors)(params, task["x"], task["y"])
        adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return errors(adapted, task["x_query"], task["y_query"])

    def loss_fn(params, batch):
        return jax.vmap(of_task, (None, 0))(params, batch).mean()

    def make(draw):
        shapes = {"x": (5, 3), "y": (5,), "x_query": (5, 3), "y_query": (5,)}
        return {name: draw.normal(size=(ROWS, *shape)) for name, shape in shapes.items()}

    return Case(params, loss_fn, make)


def maml_of_batch():
    """One gradient step on the support rows of the whole batch, the loss on the query rows: rows
    mix.
    """
    case = maml_of_tasks()

    def errors(params, x, y):
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)

    def loss_fn(params, batch):
        grads = jax.grad(errors)(params, batch["x"], batch["y"])
        adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return errors(adapted, batch["x_query"], batch["y_query"])

    return case._replace(loss_fn=loss_fn, mixing=True)


def gan():
    """Return parameters, the losses of discriminator and generator, and a function that makes
    batches.
    """
    draw = np.random.default_rng(0)

    def normal(*shape):
        return (draw.normal(size=shape) * 0.4).astype(np.float32)

    params = {
        "discriminator": {"up": normal(12, 16), "down": normal(16, 1)},
        "generator": {"up": normal(6, 16), "down": normal(16, 12)},
    }

    def generate(params, z):
        return jnp.tanh(z @ params["generator"]["up"]) @ params["generator"]["down"]

    def discriminate(params, x):
        return (
            jax.nn.leaky_relu(x @ params["discriminator"]["up"]) @ params["discriminator"]["down"]
        )

    def discriminator_loss(params, batch):
        real = discriminate(params, batch["x"])
        fake = discriminate(params, generate(params, batch["z"]))
        return jax.nn.softplus(-real).mean() + jax.nn.softplus(fake).mean()

    def generator_loss(params, batch):
        return jax.nn.softplus(-discriminate(params, generate(params, batch["z"]))).mean()

    def make(draw):
        return vectors(draw) | {"z": draw.normal(size=(ROWS, 6))}

    return params, discriminator_loss, generator_loss, make


MODELS: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (
        linen_resnet,
        nnx_cnn,
        linen_transformer,
        equinox_vit,
        equinox_batch_norm,
        haiku_transformer,
        haiku_batch_norm,
        keras_stateless,
        jraph_graphs,
        diffrax_ode,
        ppo,
        clip,
        lora,
        dpo,
        maml_of_tasks,
        maml_of_batch,
    )
}
