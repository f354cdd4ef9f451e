"""What a step sends in each view: bytes on the wire per device, counted in the compiled program.

    python benchmarks/views.py

Four losses, in float32 on eight devices, at two sizes, under ddp, zero1 and fsdp: a mean over rows,
whose views compute the same; and three that mix rows, written as for one device for the global
view, and with so.losses.gather_batch or so.losses.batch_mean for the per-device view. Nothing runs.
Claim: the per-device view never sends more.
"""

import sys

from common import fake_devices, write_json

fake_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so

DEVICES = 8
ROWS = 64
SIZES = {"small": {"width": 128, "layers": 4}, "large": {"width": 512, "layers": 8}}
STRATEGIES = {
    "ddp": so.ddp,
    "zero1": lambda *args, **options: so.zero(*args, stage=1, **options),
    "fsdp": so.fsdp,
}


def embed(params, x):
    for w in params["hidden"]:
        x = jnp.tanh(x @ w)
    return x


def mean(params, batch):
    """A mean over rows."""
    return jnp.mean((embed(params, batch["x"]) - batch["y"]) ** 2)


def contrastive(params, batch):
    """Every other row is a negative."""
    x = embed(params, batch["x"])
    y = batch["y"]
    return jnp.mean(jax.nn.logsumexp(x @ y.T, axis=1) - jnp.sum(x * y, axis=1))


def contrastive_of_rows(params, batch):
    x = embed(params, batch["x"])
    y = batch["y"]
    return jnp.mean(
        jax.nn.logsumexp(x @ so.losses.gather_batch(y).T, axis=1) - jnp.sum(x * y, axis=1)
    )


def normalised(params, batch):
    """Batch norm before the last layer."""
    x = embed(params, batch["x"])
    x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
    return jnp.mean((x - batch["y"]) ** 2)


def normalised_of_rows(params, batch):
    x = embed(params, batch["x"])
    centred = x - so.losses.batch_mean(x)
    x = centred / jnp.sqrt(so.losses.batch_mean(centred**2) + 1e-5)
    return jnp.mean((x - batch["y"]) ** 2)


def worst_half(params, batch):
    """The mean of the rows that fit worst."""
    errors = jnp.sort(jnp.mean((embed(params, batch["x"]) - batch["y"]) ** 2, axis=1))
    return jnp.mean(errors[ROWS // 2 :])


def worst_half_of_rows(params, batch):
    errors = jnp.sort(
        so.losses.gather_batch(jnp.mean((embed(params, batch["x"]) - batch["y"]) ** 2, axis=1))
    )
    return jnp.mean(errors[ROWS // 2 :])


LOSSES = {
    "mean over rows": (mean, mean),
    "contrastive": (contrastive_of_rows, contrastive),
    "batch norm": (normalised_of_rows, normalised),
    "worst half": (worst_half_of_rows, worst_half),
}


def wire_bytes(strategy, loss_fn, view, width, layers):
    """Return what a device sends in a step, and the number of collectives."""
    opt = STRATEGIES[strategy](optax.adamw(1e-3), so.make_mesh(data=DEVICES), loss_fn, view=view)
    params = {"hidden": [jax.ShapeDtypeStruct((width, width), np.float32)] * layers}
    opt.specs(params)
    rows = {name: jax.ShapeDtypeStruct((ROWS, width), np.float32) for name in "xy"}
    audit = so.hlo.audit(opt.step.lower(opt.abstract_state(), rows).compile())
    return audit.total_wire_bytes, sum(one.calls or 1 for one in audit.collectives)


def main():
    rows = []
    holds = True
    for size, sizes in SIZES.items():
        for name, (of_rows, of_batch) in LOSSES.items():
            for strategy in STRATEGIES:
                found = {
                    view: wire_bytes(strategy, loss_fn, view, **sizes)
                    for view, loss_fn in (("per_device", of_rows), ("global", of_batch))
                }
                ratio = found["global"][0] / found["per_device"][0]
                holds &= ratio >= 0.999
                rows.append(
                    {"size": size, "loss": name, "strategy": strategy, "ratio": round(ratio, 3)}
                )
                rows[-1] |= {f"{view} bytes": one[0] for view, one in found.items()}
                rows[-1] |= {f"{view} collectives": one[1] for view, one in found.items()}
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    print(
        write_json(
            __file__,
            {
                "claim": "the per-device view never sends more",
                "holds": holds,
                "rows": rows,
                "sizes": SIZES,
            },
        )
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
