"""Optimizers of every kind that `so.transforms.zero` shards: by element, by matrix, by norm, wrapped."""

import optax

import shardopt as so

ANY_OPTIMIZER = {
    "sgd": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": lambda: optax.lamb(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "muon": lambda: optax.contrib.muon(1e-2),
    "clip_adamw": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2)),
    "soap": lambda: so.optimizers.soap(1e-2),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}
