"""What a strategy costs beside plain jit + NamedSharding: seconds of a step and of its compiling,
and what was compiled.

Run: python benchmarks/beside_jit.py [--rounds 30] [--models mlp haiku flax contrastive] [--sizes
small large] [--counts]

Control: `jax.jit` of value_and_grad, optax and the gradient's norm, parameters replicated (for ddp)
or placed as so.fsdp places them (for fsdp), rows over data: the partitioner does the rest. Test:
`so.ddp` and `so.fsdp`, in both views; for a contrastive loss, which mixes rows, in the view that
`view="auto"` takes. Same parameters, numpy batches, optimizer (AdamW) and outputs, interleaved in
one run. Claim: a step takes at most 1.03 of the control's time, compiling at most 1.3. `--counts`
prints flops, bytes and instructions of the programs, which do not depend on what else the machine
does, and times nothing but the compiler.
"""

import argparse
import re
import statistics
import time

from common import fake_devices, interleave, median_ratio, write_json

fake_devices(8)

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardopt as so

TX = optax.adamw(1e-3)
SIZES = {
    "small": {"width": 64, "layers": 2, "length": 32},
    "large": {"width": 256, "layers": 4, "length": 64},
}
BATCH = 32
VOCABULARY = 256
COMPILINGS = 5


def mlp(width, layers, length):
    """Rows of vectors through square layers."""
    draw = np.random.default_rng(0)
    params = [
        (draw.normal(size=(width, width)) / width**0.5).astype(np.float32)
        for _ in range(2 * layers)
    ]

    def loss_fn(params, batch):
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    rows = BATCH * length // 4
    batches = [
        {name: draw.normal(size=(rows, width)).astype(np.float32) for name in "xy"}
        for _ in range(4)
    ]
    return params, loss_fn, batches


def contrastive(width, layers, length):
    """Rows through square layers, each against all others: `view="auto"` runs it on the whole
    batch.
    """
    params, _, batches = mlp(width, layers, length)

    def loss_fn(params, batch):
        x = batch["x"]
        y = batch["y"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(jax.nn.logsumexp(x @ y.T, axis=1) - jnp.sum(x * y, axis=1))

    return params, loss_fn, batches


def _tokens(apply, length):
    def loss_fn(params, batch):
        logits = apply(params, batch["tokens"][:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["tokens"][:, 1:]
        ).mean()

    draw = np.random.default_rng(0)
    return loss_fn, [
        {"tokens": draw.integers(0, VOCABULARY, (BATCH, length + 1), np.int32)} for _ in range(4)
    ]


def haiku(width, layers, length):
    """Haiku's transformer, of its own attention, MLP and norm."""

    def forward(tokens):
        x = hk.Embed(VOCABULARY, width)(tokens)
        mask = jnp.tril(jnp.ones((1, 1, tokens.shape[1], tokens.shape[1])))
        for _ in range(layers):
            y = hk.LayerNorm(-1, True, True)(x)
            draw = hk.initializers.VarianceScaling(1.0)
            x = x + hk.MultiHeadAttention(4, width // 4, w_init=draw, model_size=width)(
                y, y, y, mask
            )
            x = x + hk.nets.MLP([4 * width, width])(hk.LayerNorm(-1, True, True)(x))
        return hk.Linear(VOCABULARY)(x)

    net = hk.without_apply_rng(hk.transform(forward))
    return jax.jit(net.init)(jax.random.key(0), jnp.zeros((1, length), jnp.int32)), *_tokens(
        net.apply, length
    )


def flax(width, layers, length):
    """Linen's transformer, of its own attention, Dense and norm."""

    class Transformer(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            x = linen.Embed(VOCABULARY, width)(tokens)
            mask = linen.make_causal_mask(tokens)
            for _ in range(layers):
                x = x + linen.MultiHeadDotProductAttention(4)(linen.LayerNorm()(x), mask=mask)
                x = x + linen.Dense(width)(linen.gelu(linen.Dense(4 * width)(linen.LayerNorm()(x))))
            return linen.Dense(VOCABULARY)(x)

    net = Transformer()
    return jax.jit(net.init)(jax.random.key(0), jnp.zeros((1, length), jnp.int32)), *_tokens(
        net.apply, length
    )


MODELS = {"mlp": mlp, "haiku": haiku, "flax": flax, "contrastive": contrastive}
VIEWS = {"contrastive": ("auto",)}
"""The views of a model that has not both."""


def plain(mesh, loss_fn, params, specs):
    """Return the jitted step of plain jax, and its first state."""
    on = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )
    params = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=on)(params)
    like = jax.eval_shape(TX.init, params)
    on_state = optax.tree_utils.tree_map_params(
        TX, lambda _, s: s, like, on, transform_non_params=lambda _: NamedSharding(mesh, P())
    )
    state = params, jax.jit(TX.init, out_shardings=on_state)(params)

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
        }

    rows = NamedSharding(mesh, P("data"))
    everywhere = NamedSharding(mesh, P())
    shardings = (on, on_state)
    jitted = jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(shardings, rows),
        out_shardings=(shardings, {"loss": everywhere, "grad_norm": everywhere}),
    )
    return jitted, state, lambda batch: jax.device_put(batch, rows)


def contenders(mesh, model, views):
    """Return name -> (step with .lower, state, place): the controls, and the strategies in these
    views.
    """
    params, loss_fn, _ = model
    made = {}
    for name, strategy in (("ddp", so.ddp), ("fsdp", so.fsdp)):
        for view in views:
            opt = strategy(TX, mesh, loss_fn, view=view)
            made[f"{name} {view}"] = opt.step, opt.init(params), lambda batch: batch
        made[f"{name} jit"] = plain(mesh, loss_fn, params, opt.specs(params).params)
    return made


def compiling(step, state, batch):
    """Return seconds to trace, to compile and of the processor, and both programs.

    Nothing traced before is known.
    """
    jax.clear_caches()
    started = time.perf_counter(), time.process_time()
    lowered = step.lower(state, batch)
    traced = time.perf_counter(), time.process_time()
    compiled = lowered.compile()
    done = time.perf_counter(), time.process_time()
    seconds = {
        "trace seconds": traced[0] - started[0],
        "compile seconds": done[0] - traced[0],
        "cpu seconds": done[1] - started[1],
    }
    return seconds, lowered, compiled


def counts(lowered, compiled):
    """Return flops, bytes and instructions of the program of one device."""
    cost = compiled.cost_analysis()
    text = compiled.as_text()
    return {
        "flops": cost["flops"],
        "bytes": cost["bytes accessed"],
        "instructions": len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", text, re.MULTILINE)),
        "fusions": len(re.findall(r" fusion\(", text)),
        "copies": len(re.findall(r" copy\(", text)),
        "collectives": len(
            re.findall(
                r" (?:all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)\(", text
            )
        ),
        "stablehlo lines": lowered.as_text().count("\n"),
    }


def compare(name, size, rounds, only_counts):
    """Compile every contender, and time them in turns; check first that they compute the same."""
    mesh = so.make_mesh()
    model = MODELS[name](**SIZES[size])
    made = contenders(mesh, model, VIEWS.get(name, ("per_device", "global")))
    batches = model[2]
    seconds = {who: [] for who in made}
    results = {}
    for turn in range(-1, COMPILINGS):  # the first warms up what all use
        for who in list(made) if turn % 2 else reversed(made):
            step, state, place = made[who]
            taken, *programs = compiling(step, state, place(batches[0]))
            results[who] = counts(*programs)
            if turn >= 0:
                seconds[who].append(taken)
    if not only_counts:
        run = {}
        for who, (step, state, place) in made.items():
            run[who] = turns(step, state, place, batches)
        losses = {who: float(one()[0]["loss"]) for who, one in run.items()}
        np.testing.assert_allclose(list(losses.values()), losses["ddp jit"], rtol=1e-4)
        times = interleave(run, rounds=rounds)
        for who, steps in times.items():
            results[who]["median seconds"] = statistics.median(steps)
            results[who]["time ratio"] = median_ratio(steps, times[f"{who.split()[0]} jit"])
    for who, row in results.items():
        mine = seconds[who]
        base = seconds[f"{who.split()[0]} jit"]
        row |= {part: statistics.median(one[part] for one in mine) for part in mine[0]}
        spent = [
            [one["trace seconds"] + one["compile seconds"] for one in of] for of in (mine, base)
        ]
        row["compile ratio"] = median_ratio(*spent)
        row["cpu ratio"] = median_ratio(
            *[[one["cpu seconds"] for one in of] for of in (mine, base)]
        )
        shown = "  ".join(f"{key} {value:,.3g}" for key, value in row.items())
        print(f"{name} {size} {who:16} {shown}", flush=True)
    return results


def turns(step, state, place, batches):
    """Return a function that takes the next step."""
    now = {"state": state, "turn": 0}

    def one():
        now["state"], metrics = step(now["state"], place(batches[now["turn"] % len(batches)]))
        now["turn"] += 1
        return metrics, now["state"]

    return one


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument(
        "--counts", action="store_true", help="compile and count only; writes no file"
    )
    asked = parser.parse_args()
    results = {
        f"{name} {size}": compare(name, size, asked.rounds, asked.counts)
        for size in asked.sizes
        for name in asked.models
    }
    if not asked.counts:  # some models get a file of their own
        named = (
            __file__ if asked.models == list(MODELS) else f"beside_jit_{'_'.join(asked.models)}.py"
        )
        print("wrote", write_json(named, results))


if __name__ == "__main__":
    main()
