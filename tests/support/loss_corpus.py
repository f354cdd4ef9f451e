"""Losses of public code, each with its source, and whether it is a (weighted) mean over rows.

They are the measure of the proof: it accepts none that mixes rows, and falls back on at most one
mean in twenty. A loss is written small, in the way of its source: with the same operations on rows.
The last section has the kinds that issue 61 names: means that the proof of 2026-11-28 did not know.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import shardopt as so

ROWS = 8
FEATURES = 6
CLASSES = 3
LENGTH = 5
Weighted = so.losses.Weighted


class PublicLoss(NamedTuple):
    """A loss of public code.

    Attributes:
      loss_fn: `loss_fn(params, batch)`, or `loss_fn(params, batch, rng)` if it draws numbers.
      source: "owner/repository: path", or "issue 61".
      is_mean: whether it is a (weighted) mean over rows.
      draws: whether it takes a random key.
    """

    loss_fn: Callable[..., Any]
    source: str
    is_mean: bool = True
    draws: bool = False


CORPUS: dict[str, PublicLoss] = {}


def of(source: str, *, is_mean: bool = True, draws: bool = False) -> Callable[[Callable], Callable]:
    """Return a decorator that adds a loss to the corpus."""

    def add(loss_fn: Callable) -> Callable:
        CORPUS[loss_fn.__name__] = PublicLoss(loss_fn, source, is_mean, draws)
        return loss_fn

    return add


mixing = functools.partial(of, is_mean=False)
drawing = functools.partial(of, draws=True)


kind = of("issue 61")


def _batch() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(3)
    rows = {"x": FEATURES, "other": FEATURES, "noise": FEATURES, "y": CLASSES}
    sequences = {"reward": (), "old_log_p": (), "seq": (FEATURES,), "value": ()}
    batch = {name: draw.normal(size=(ROWS, width)) for name, width in rows.items()}
    batch |= {name: draw.normal(size=(ROWS, LENGTH, *shape)) for name, shape in sequences.items()}
    return batch | {
        "scalar": draw.normal(size=ROWS),
        "time": draw.uniform(0.2, 0.8, ROWS),
        "mask": (draw.uniform(size=(ROWS, LENGTH)) < 0.7).astype(float) + 0.1,
        "image": draw.normal(size=(ROWS, 8, 8, 2)),
        "matrix": draw.normal(size=(ROWS, CLASSES, CLASSES)),
        "label": draw.integers(0, CLASSES, ROWS),
        "tokens": draw.integers(0, FEATURES, (ROWS, LENGTH)),
        "targets": draw.integers(1, FEATURES, (ROWS, LENGTH)),
        "lengths": draw.integers(2, LENGTH + 1, ROWS),
        "steps": draw.integers(1, 4, ROWS),
        "senders": draw.integers(0, LENGTH, (ROWS, 7)),
        "receivers": draw.integers(0, LENGTH, (ROWS, 7)),
    }


def _params() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(4)
    sizes = {
        "up": (FEATURES, 6),
        "down": (6, CLASSES),
        "bias": (6,),
        "scale": (FEATURES,),
        "mean": (CLASSES,),
        "embedding": (FEATURES, 6),
        "head": (6, FEATURES),
        "square": (6, 6),
        "small": (CLASSES, CLASSES),
        "kernel": (3, 3, 2, 4),
        "filter": (3,),
        "codes": (4, 6),
        "value": (6,),
        "positions": (LENGTH, 6),
    }
    return {name: 0.4 * draw.normal(size=size) for name, size in sizes.items()}


BATCH = _batch()
PARAMS = _params()


def hidden(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["up"] + p["bias"])


def logits_of(p: Any, x: Any) -> Any:
    return hidden(p, x) @ p["down"]


def token_logits(p: Any, b: Any) -> Any:
    """Return logits [rows, length, vocabulary] of a model with one causal attention."""
    x = p["embedding"][b["tokens"]] + p["positions"]
    scores = jnp.einsum("btd,bsd->bts", x @ p["square"], x) / jnp.sqrt(6.0)
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    return jnp.einsum("bts,bsd->btd", weights, x) @ p["head"]


def token_log_p(p: Any, b: Any) -> Any:
    log_p = jax.nn.log_softmax(token_logits(p, b))
    return jnp.take_along_axis(log_p, b["targets"][..., None], -1)[..., 0]


def features_of_image(p: Any, image: Any) -> Any:
    out = jax.lax.conv_general_dilated(
        image, p["kernel"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.mean(jax.nn.relu(out), (1, 2))


def normalised(x: Any) -> Any:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


# --- optax.losses ---------------------------------------------------------------------------------

CLASSIFICATION = "google-deepmind/optax: optax/losses/_classification.py"
REGRESSION = "google-deepmind/optax: optax/losses/_regression.py"


@of(CLASSIFICATION)
def softmax_cross_entropy(p, b):
    logits = logits_of(p, b["x"])
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, b["label"]).mean()


@of(CLASSIFICATION)
def sigmoid_binary_cross_entropy(p, b):
    targets = jax.nn.one_hot(b["label"], CLASSES)
    return optax.losses.sigmoid_binary_cross_entropy(logits_of(p, b["x"]), targets).mean()


@of(CLASSIFICATION)
def sigmoid_focal_loss(p, b):
    targets = jax.nn.one_hot(b["label"], CLASSES)
    return optax.losses.sigmoid_focal_loss(logits_of(p, b["x"]), targets, alpha=0.25).mean()


@of(CLASSIFICATION)
def poly_loss_cross_entropy(p, b):
    targets = jax.nn.one_hot(b["label"], CLASSES)
    return optax.losses.poly_loss_cross_entropy(logits_of(p, b["x"]), targets).mean()


@of(CLASSIFICATION)
def multiclass_hinge_loss(p, b):
    return optax.losses.multiclass_hinge_loss(logits_of(p, b["x"]), b["label"]).mean()


@of(CLASSIFICATION)
def multiclass_sparsemax_loss(p, b):
    return optax.losses.multiclass_sparsemax_loss(logits_of(p, b["x"]), b["label"]).mean()


@of(CLASSIFICATION)
def kl_divergence(p, b):
    log_p = jax.nn.log_softmax(logits_of(p, b["x"]))
    return optax.losses.kl_divergence(log_p, jax.nn.softmax(b["y"])).mean()


@of(CLASSIFICATION)
def ctc_loss(p, b):
    padding = (jnp.arange(LENGTH) >= b["lengths"][:, None]).astype(float)
    labels = b["targets"][:, :2]
    label_padding = jnp.zeros((len(padding), 2))
    return optax.losses.ctc_loss(token_logits(p, b), padding, labels, label_padding).mean()


@of(REGRESSION)
def huber_loss(p, b):
    return optax.losses.huber_loss(logits_of(p, b["x"]), b["y"]).mean()


@of(REGRESSION)
def log_cosh(p, b):
    return optax.losses.log_cosh(logits_of(p, b["x"]), b["y"]).mean()


@of(REGRESSION)
def cosine_distance(p, b):
    return optax.losses.cosine_distance(logits_of(p, b["x"]), b["y"], epsilon=1e-3).mean()


@of("google-deepmind/optax: optax/losses/_self_supervised.py")
def triplet_margin_loss(p, b):
    anchor, positive, negative = (hidden(p, b[name]) for name in ("x", "other", "noise"))
    return optax.losses.triplet_margin_loss(anchor, positive, negative).mean()


@mixing("google-deepmind/optax: optax/losses/_self_supervised.py")
def ntxent(p, b):
    return optax.losses.ntxent(logits_of(p, b["x"]), b["label"])


@of("google-deepmind/optax: optax/losses/_segmentation.py")
def dice_loss(p, b):
    targets = jax.nn.one_hot(b["tokens"], FEATURES)
    return optax.losses.dice_loss(token_logits(p, b), targets, axis=(1,)).mean()


@of("google-deepmind/optax: optax/losses/_fenchel_young.py")
def fenchel_young(p, b):
    loss = optax.losses.make_fenchel_young_loss(jax.nn.logsumexp)
    return jax.vmap(loss)(logits_of(p, b["x"]), jax.nn.one_hot(b["label"], CLASSES)).mean()


@mixing("google-deepmind/optax: optax/losses/_ranking.py")
def ranking_softmax_loss_with_a_mask(p, b):
    scores = token_logits(p, b)[..., 0]
    return optax.losses.ranking_softmax_loss(scores, b["reward"], where=b["label"][:, None] > 0)


# --- image classification, distillation, semi-supervision -----------------------------------------


@of("google/flax: examples/imagenet/train.py")
def image_classifier_with_decay(p, b):
    logits = features_of_image(p, b["image"]) @ p["small"].repeat(2, 0)[:4]
    loss = optax.softmax_cross_entropy(logits, jax.nn.one_hot(b["label"], CLASSES)).mean()
    decay = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p) if leaf.ndim > 1)
    return loss + 1e-4 * 0.5 * decay, {"accuracy": jnp.mean(logits.argmax(-1) == b["label"])}


@of("google-research/big_vision: big_vision/trainers/proj/distill/distill.py")
def distillation(p, b):
    teacher = b["y"] / 2.0
    student = logits_of(p, b["x"]) / 2.0
    log_teacher = jax.nn.log_softmax(teacher)
    return jnp.mean(jnp.sum(jnp.exp(log_teacher) * (log_teacher - jax.nn.log_softmax(student)), -1))


@drawing("google-research/big_vision: big_vision/trainers/proj/flexi/train.py")
def classifier_with_dropout(p, b, rng):
    h = hidden(p, b["x"])
    h = jnp.where(jax.random.bernoulli(rng, 0.9, h.shape), h / 0.9, 0.0)
    return optax.softmax_cross_entropy_with_integer_labels(h @ p["down"], b["label"]).mean()


@of("google-research/fixmatch: fixmatch.py")
def fixmatch(p, b):
    weak = jax.lax.stop_gradient(logits_of(p, b["x"]))
    strong = logits_of(p, b["other"])
    probabilities = jax.nn.softmax(weak)
    confident = jnp.max(probabilities, -1) >= 0.4
    pseudo = optax.softmax_cross_entropy_with_integer_labels(strong, jnp.argmax(weak, -1))
    return jnp.mean(pseudo * confident), {"share": confident.mean()}


@of("Raschka-research-group/coral-pytorch: coral_pytorch/losses.py")
def ordinal_coral(p, b):
    logits = hidden(p, b["x"]) @ p["value"][:, None] + p["mean"][: CLASSES - 1]
    levels = (b["label"][:, None] > jnp.arange(CLASSES - 1)).astype(logits.dtype)
    terms = jax.nn.log_sigmoid(logits) * levels
    terms += (jax.nn.log_sigmoid(logits) - logits) * (1 - levels)
    return jnp.mean(-jnp.sum(terms, axis=1))


@of("kuangliu/pytorch-retinanet: loss.py")
def focal_detection(p, b):
    logits = token_logits(p, b)
    positive = b["targets"] > 2
    focal = optax.sigmoid_focal_loss(logits, jax.nn.one_hot(b["targets"], FEATURES))
    boxes = optax.huber_loss(hidden(p, b["seq"]), b["seq"] * 0.5)
    total = focal.sum() + (boxes * positive[..., None]).sum()
    return Weighted(total, positive.sum())


@mixing("google/flax: examples/imagenet/train.py")
def batch_normalised(p, b):
    h = b["x"] @ p["up"]
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
    return optax.softmax_cross_entropy_with_integer_labels(h @ p["down"], b["label"]).mean()


# --- self-supervision -----------------------------------------------------------------------------


@mixing("google-research/simclr: objective.py")
def simclr(p, b):
    z1 = normalised(hidden(p, b["x"]))
    z2 = normalised(hidden(p, b["other"]))
    self_mask = jnp.eye(len(z1)) * 1e9
    logits = jnp.concatenate([z1 @ z2.T, z1 @ z1.T - self_mask], 1) / 0.1
    return jnp.mean(optax.softmax_cross_entropy(logits, jnp.eye(len(z1), 2 * len(z1))))


@mixing("mlfoundations/open_clip: src/open_clip/loss.py")
def clip_loss(p, b):
    image = normalised(hidden(p, b["x"]))
    text = normalised(b["other"] @ p["square"])
    logits = image @ text.T * jnp.exp(p["scale"][0])
    labels = jnp.arange(len(logits))
    both = [optax.softmax_cross_entropy_with_integer_labels(x, labels) for x in (logits, logits.T)]
    return (both[0].mean() + both[1].mean()) / 2


@mixing("google-research/big_vision: big_vision/trainers/proj/image_text/siglip.py")
def siglip(p, b):
    image = normalised(hidden(p, b["x"]))
    text = normalised(b["other"] @ p["square"])
    logits = image @ text.T * jnp.exp(p["scale"][0]) + p["scale"][1]
    signs = 2 * jnp.eye(len(logits)) - 1
    return -jnp.mean(jnp.sum(jax.nn.log_sigmoid(signs * logits), -1))


@mixing("facebookresearch/vicreg: main_vicreg.py")
def vicreg(p, b):
    z1 = hidden(p, b["x"])
    z2 = hidden(p, b["other"])
    spread = sum(jnp.mean(jax.nn.relu(1 - jnp.sqrt(z.var(0) + 1e-4))) for z in (z1, z2))
    centred = z1 - z1.mean(0)
    covariance = centred.T @ centred / (len(z1) - 1)
    off_diagonal = jnp.sum(covariance**2) - jnp.sum(jnp.diag(covariance) ** 2)
    return 25 * jnp.mean((z1 - z2) ** 2) + 25 * spread + off_diagonal / 6


@mixing("facebookresearch/barlowtwins: main.py")
def barlow_twins(p, b):
    z1 = hidden(p, b["x"])
    z2 = hidden(p, b["other"])
    z1, z2 = ((z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-5) for z in (z1, z2))
    correlation = z1.T @ z2 / len(z1)
    return jnp.sum((correlation - jnp.eye(6)) ** 2)


@mixing("HobbitLong/SupContrast: losses.py")
def supervised_contrast(p, b):
    z = normalised(hidden(p, b["x"]))
    log_p = jax.nn.log_softmax(z @ z.T / 0.1 - jnp.eye(len(z)) * 1e9)
    same = (b["label"][:, None] == b["label"]) & ~jnp.eye(len(z), dtype=bool)
    return -jnp.mean(jnp.sum(jnp.where(same, log_p, 0), 1) / jnp.maximum(same.sum(1), 1))


@of("google-deepmind/deepmind-research: byol/byol_experiment.py")
def byol(p, b):
    online = normalised(hidden(p, b["x"]) @ p["square"])
    target = normalised(jax.lax.stop_gradient(hidden(p, b["other"])))
    return jnp.mean(jnp.sum((online - target) ** 2, -1))


@of("facebookresearch/simsiam: main_simsiam.py")
def simsiam(p, b):
    z1 = hidden(p, b["x"])
    z2 = hidden(p, b["other"])
    pairs = [(z1 @ p["square"], z2), (z2 @ p["square"], z1)]
    cosines = [
        jnp.sum(normalised(a) * normalised(jax.lax.stop_gradient(z)), -1).mean() for a, z in pairs
    ]
    return -sum(cosines) / 2


@of("facebookresearch/dino: main_dino.py")
def dino(p, b):
    teacher = jax.nn.softmax((jax.lax.stop_gradient(logits_of(p, b["x"])) - p["mean"]) / 0.04)
    return jnp.mean(jnp.sum(-teacher * jax.nn.log_softmax(logits_of(p, b["other"]) / 0.1), -1))


@drawing("facebookresearch/mae: models_mae.py")
def masked_autoencoder(p, b, rng):
    noise = jax.random.uniform(rng, b["seq"].shape[:2])
    order = jnp.argsort(noise, axis=1)
    restore = jnp.argsort(order, axis=1)
    visible = jnp.take_along_axis(b["seq"], order[:, :2, None], axis=1)
    encoded = hidden(p, visible)
    filler = jnp.broadcast_to(p["scale"], (len(encoded), LENGTH - 2, FEATURES))
    tokens = jnp.take_along_axis(jnp.concatenate([encoded, filler], 1), restore[..., None], axis=1)
    masked = (restore >= 2).astype(float)
    errors = jnp.mean((tokens @ p["square"] - b["seq"]) ** 2, -1)
    return jnp.sum(errors * masked) / jnp.sum(masked)


# --- language models ------------------------------------------------------------------------------


@of("google/flax: examples/lm1b/train.py")
def language_model(p, b):
    weights = (b["targets"] > 1).astype(float)
    return Weighted(-jnp.sum(token_log_p(p, b) * weights), weights.sum())


@of("google-research/t5x: t5x/losses.py")
def cross_entropy_with_z_loss(p, b):
    logits = token_logits(p, b)
    log_z = jax.nn.logsumexp(logits, -1, keepdims=True)
    targets = optax.smooth_labels(jax.nn.one_hot(b["targets"], FEATURES), 0.1)
    loss = -jnp.sum(targets * (logits - log_z), -1) + 1e-4 * jnp.squeeze(log_z**2, -1)
    return Weighted(jnp.sum(loss * b["mask"]), jnp.sum(b["mask"]))


@of("AI-Hypercomputer/maxtext: src/MaxText/train.py")
def packed_language_model(p, b):
    segments = (jnp.arange(LENGTH) >= b["lengths"][:, None]).astype(jnp.int32) + 1
    same = segments[:, :, None] == segments[:, None, :]
    x = p["embedding"][b["tokens"]]
    scores = jnp.where(
        same & jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), x @ x.swapaxes(1, 2), -1e9
    )
    log_p = jax.nn.log_softmax(jax.nn.softmax(scores) @ x @ p["head"])
    weights = (segments != 0).astype(float)
    loss = -jnp.sum(log_p * jax.nn.one_hot(b["targets"], FEATURES), -1)
    return Weighted(jnp.sum(loss * weights), jnp.sum(weights) + 0.0)


@of("eric-mitchell/direct-preference-optimization: trainers.py")
def dpo(p, b):
    chosen = jnp.sum(token_log_p(p, b) * b["mask"], -1)
    rejected = jnp.sum(token_log_p(p, {**b, "targets": b["tokens"]}) * b["mask"], -1)
    logits = chosen - rejected - jnp.sum(b["old_log_p"], -1)
    losses = -jax.nn.log_sigmoid(0.1 * logits) * 0.9 - jax.nn.log_sigmoid(-0.1 * logits) * 0.1
    return losses.mean(), {"margin": logits.mean(), "accuracy": (logits > 0).mean()}


@of("huggingface/trl: trl/trainer/orpo_trainer.py")
def orpo(p, b):
    chosen = jnp.sum(token_log_p(p, b) * b["mask"], -1) / LENGTH
    rejected = jnp.mean(token_log_p(p, {**b, "targets": b["tokens"]}), -1)
    odds = chosen - rejected - jnp.log1p(-jnp.exp(chosen)) + jnp.log1p(-jnp.exp(rejected))
    return jnp.mean(-jax.nn.log_sigmoid(odds)) - token_log_p(p, b).mean()


@mixing("huggingface/trl: trl/trainer/kto_trainer.py")
def kto(p, b):
    ratio = jnp.sum(token_log_p(p, b) - b["old_log_p"] + 4.0, -1)
    baseline = jax.lax.stop_gradient(jnp.maximum(ratio.mean(), 0))
    desired = b["label"] > 0
    return jnp.mean(1 - jax.nn.sigmoid(jnp.where(desired, ratio - baseline, baseline - ratio)))


@of("huggingface/trl: trl/trainer/grpo_trainer.py")
def grpo(p, b):
    log_p = token_log_p(p, b)
    ratio = jnp.exp(log_p - b["old_log_p"])
    advantage = b["scalar"][:, None]
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    gap = b["value"] - log_p
    loss = -gain + 0.04 * (jnp.exp(gap) - gap - 1)
    per_row = jnp.sum(loss * b["mask"], -1) / jnp.maximum(jnp.sum(b["mask"], -1), 1.0)
    return per_row.mean()


@of("huggingface/trl: trl/trainer/gkd_trainer.py")
def generalised_distillation(p, b):
    student = jax.nn.log_softmax(token_logits(p, b))
    teacher = jax.nn.log_softmax(b["seq"])
    mixture = jnp.logaddexp(student + jnp.log(0.5), teacher + jnp.log(0.5))
    terms = [jnp.exp(x) * (x - mixture) for x in (student, teacher)]
    return Weighted(jnp.sum(sum(terms).sum(-1) * b["mask"]) / 2, jnp.sum(b["mask"]))


@of("tensorflow/models: official/nlp/modeling/losses/weighted_sparse_categorical_crossentropy.py")
def masked_language_model(p, b):
    positions = jnp.argsort(b["targets"], axis=1)[:, :2]
    picked = jnp.take_along_axis(token_logits(p, b), positions[..., None], axis=1)
    labels = jnp.take_along_axis(b["tokens"], positions, axis=1)
    losses = optax.softmax_cross_entropy_with_integer_labels(picked, labels)
    return Weighted(jnp.sum(losses * b["mask"][:, :2]), jnp.sum(b["mask"][:, :2]))


@drawing("louaaron/Score-Entropy-Discrete-Diffusion: losses.py")
def masked_diffusion(p, b, rng):
    keys = jax.random.split(rng)
    rate = jax.random.uniform(keys[0], (len(b["tokens"]), 1), minval=0.1)
    masked = jax.random.uniform(keys[1], b["tokens"].shape) < rate
    tokens = jnp.where(masked, 0, b["tokens"])
    return jnp.mean(-token_log_p(p, {**b, "tokens": tokens}) * masked / rate)


@of("google/rax: rax/_src/losses.py")
def pairwise_ranking(p, b):
    scores = token_logits(p, b)[..., 0]
    better = b["reward"][:, :, None] > b["reward"][:, None, :]
    gaps = scores[:, :, None] - scores[:, None, :]
    return jnp.mean(jnp.sum(jnp.where(better, jax.nn.softplus(-gaps), 0), (1, 2)))


# --- reinforcement learning -----------------------------------------------------------------------


@of("google/flax: examples/ppo/ppo_lib.py")
def ppo(p, b):
    log_p = jax.nn.log_softmax(logits_of(p, b["x"]))
    taken = jax.vmap(lambda row, action: row[action])(log_p, b["label"])
    ratios = jnp.exp(taken - b["time"])
    clipped = jnp.clip(ratios, 0.9, 1.1) * b["scalar"]
    value = hidden(p, b["x"]) @ p["value"]
    entropy = jnp.sum(-jnp.exp(log_p) * log_p, 1).mean()
    gain = jnp.mean(jnp.minimum(ratios * b["scalar"], clipped))
    return -gain + 0.5 * jnp.mean((b["scalar"] - value) ** 2) - 0.01 * entropy


@mixing("vwxyzjn/cleanrl: cleanrl/cleanrl/ppo.py")
def ppo_with_normalised_advantages(p, b):
    advantage = (b["scalar"] - b["scalar"].mean()) / (b["scalar"].std() + 1e-8)
    log_p = jax.nn.log_softmax(logits_of(p, b["x"]))
    taken = jnp.take_along_axis(log_p, b["label"][:, None], 1)[:, 0]
    return -jnp.mean(jnp.exp(taken - b["time"]) * advantage)


@of("google-deepmind/rlax: rlax/_src/value_learning.py")
def double_q_learning(p, b):
    q = logits_of(p, b["x"])
    q_next = jax.lax.stop_gradient(logits_of(p, b["other"]))

    def td_error(q_row, action, reward, next_row, selector):
        return reward + 0.9 * next_row[jnp.argmax(selector)] - q_row[action]

    errors = jax.vmap(td_error)(q, b["label"], b["scalar"], q_next, b["y"])
    return jnp.mean(optax.huber_loss(errors))


@of("google-deepmind/rlax: rlax/_src/vtrace.py")
def vtrace(p, b):
    def targets(values, rewards, ratios):
        clipped = jnp.minimum(1.0, ratios)
        errors = clipped * (rewards + 0.9 * jnp.append(values[1:], 0.0) - values)
        _, corrections = jax.lax.scan(
            lambda acc, item: (item[0] + 0.9 * item[1] * acc,) * 2,
            0.0,
            (errors, clipped),
            reverse=True,
        )
        return values + corrections

    values = hidden(p, b["seq"]) @ p["value"]
    goal = jax.vmap(targets)(values, b["reward"], jnp.exp(b["old_log_p"]))
    return 0.5 * jnp.mean((jax.lax.stop_gradient(goal) - values) ** 2)


@of("google/dopamine: dopamine/jax/agents/implicit_quantile/implicit_quantile_agent.py")
def quantile_huber(p, b):
    predicted = token_logits(p, b)
    target = b["seq"]
    errors = target[:, :, None, :] - predicted[:, :, :, None]
    taus = (jnp.arange(FEATURES) + 0.5) / FEATURES
    weights = jnp.abs(taus[:, None] - (errors < 0).astype(float))
    return jnp.mean(jnp.sum(jnp.mean(weights * optax.huber_loss(errors), -1), (1, 2)))


@of("ikostrikov/implicit_q_learning: critic.py")
def expectile_value(p, b):
    gap = b["scalar"] - hidden(p, b["x"]) @ p["value"]
    loss = (jnp.where(gap > 0, 0.7, 0.3) * gap**2).mean()
    return loss, {"v": (hidden(p, b["x"]) @ p["value"]).mean()}


@drawing("ikostrikov/jaxrl: jaxrl/agents/sac/actor.py")
def soft_actor(p, b, rng):
    mean = logits_of(p, b["x"])
    log_std = jnp.clip(hidden(p, b["x"])[:, :CLASSES], -5, 2)
    actions = mean + jnp.exp(log_std) * jax.random.normal(rng, mean.shape)
    log_p = -0.5 * ((actions - mean) / jnp.exp(log_std)) ** 2 - log_std
    log_p = jnp.sum(log_p - 2 * (jnp.log(2.0) - actions - jax.nn.softplus(-2 * actions)), -1)
    value = jnp.sum(jnp.tanh(actions) * p["mean"], -1)
    return jnp.mean(jnp.exp(p["scale"][0]) * log_p - value), {"entropy": -log_p.mean()}


@of("vwxyzjn/cleanrl: cleanrl/c51_jax.py")
def categorical_q(p, b):
    atoms = jnp.linspace(-1.0, 1.0, FEATURES)
    step = atoms[1] - atoms[0]
    target = jnp.clip(b["scalar"][:, None] + 0.9 * atoms, -1.0, 1.0)
    place = (target + 1.0) / step
    low = jnp.floor(place)
    high = jnp.ceil(place)
    mass = jax.nn.softmax(b["seq"][:, 0])

    def project(low, high, place, mass):
        new = jnp.zeros(FEATURES)
        new = new.at[low.astype(int)].add(mass * (high + (low == high) - place))
        return new.at[high.astype(int)].add(mass * (place - low))

    goal = jax.vmap(project)(low, high, place, mass)
    return jnp.mean(-jnp.sum(goal * jax.nn.log_softmax(b["x"] @ p["square"]), -1))


@of("danijar/dreamerv3: dreamerv3/agent.py")
def two_hot_returns(p, b):
    bins = jnp.linspace(-3.0, 3.0, FEATURES)
    below = jnp.sum(bins <= b["reward"][..., None], -1) - 1
    below, above = jnp.clip(below, 0, FEATURES - 1), jnp.clip(below + 1, 0, FEATURES - 1)
    to_below = jnp.abs(bins[below] - b["reward"]) + 1e-3
    to_above = jnp.abs(bins[above] - b["reward"]) + 1e-3
    total = to_below + to_above
    target = jax.nn.one_hot(below, FEATURES) * (to_above / total)[..., None]
    target += jax.nn.one_hot(above, FEATURES) * (to_below / total)[..., None]
    return -jnp.mean(jnp.sum(target * jax.nn.log_softmax(token_logits(p, b)), -1))


# --- generative models ----------------------------------------------------------------------------


@of("google/flax: examples/vae/train.py")
def variational_autoencoder(p, b):
    mean = hidden(p, b["x"])
    log_var = b["x"] @ p["square"]
    z = mean + jnp.exp(0.5 * log_var) * b["noise"]
    bce = optax.sigmoid_binary_cross_entropy(z @ p["head"], jax.nn.sigmoid(b["x"]))
    kld = -0.5 * jnp.sum(1 + log_var - mean**2 - jnp.exp(log_var), -1)
    return bce.sum(-1).mean() + kld.mean(), {"bce": bce.mean(), "kld": kld.mean()}


@of("google-deepmind/dm-haiku: examples/vqvae_example.ipynb")
def vector_quantised(p, b):
    z = hidden(p, b["x"])
    distances = jnp.sum(z**2, 1, keepdims=True) - 2 * z @ p["codes"].T + jnp.sum(p["codes"] ** 2, 1)
    code = p["codes"][jnp.argmin(distances, 1)]
    stop = jax.lax.stop_gradient
    commitment = jnp.mean((stop(code) - z) ** 2) + jnp.mean((code - stop(z)) ** 2)
    return jnp.mean(((z + stop(code - z)) @ p["head"] - b["x"]) ** 2) + commitment


@of("openai/improved-diffusion: improved_diffusion/gaussian_diffusion.py")
def diffusion(p, b):
    betas = jnp.linspace(1e-3, 0.2, 4)
    alphas = jnp.cumprod(1 - betas)
    alpha = alphas[b["steps"]][:, None]
    noisy = jnp.sqrt(alpha) * b["x"] + jnp.sqrt(1 - alpha) * b["noise"]
    predicted = hidden(p, noisy + p["embedding"][b["steps"]]) @ p["head"]
    return jnp.mean((predicted - b["noise"]) ** 2)


@drawing("patrick-kidger/equinox: docs/examples/score_based_diffusion.ipynb")
def score_matching(p, b, rng):
    rows = len(b["x"])
    time_key, loss_key = jax.random.split(rng)
    times = jax.random.uniform(time_key, (rows,), minval=0.1, maxval=1.0)

    def one(row, time, row_key):
        noise = jax.random.normal(row_key, row.shape)
        std = jnp.sqrt(1 - jnp.exp(-time))
        predicted = hidden(p, row * jnp.exp(-0.5 * time) + std * noise) @ p["head"]
        return std**2 * jnp.mean((predicted + noise / std) ** 2)

    return jnp.mean(jax.vmap(one)(b["x"], times, jax.random.split(loss_key, rows)))


@of("facebookresearch/flow_matching: examples/2d_flow_matching.ipynb")
def flow_matching(p, b):
    time = b["time"][:, None]
    point = (1 - time) * b["noise"] + time * b["x"]
    velocity = hidden(p, point) * time @ p["head"]
    return jnp.power(velocity - (b["x"] - b["noise"]), 2).mean()


@of("patrick-kidger/equinox: docs/examples/deep_convolutional_gan.ipynb")
def gan_discriminator(p, b):
    real, fake = (features_of_image(p, b["image"] * s) @ p["value"][:4] for s in (1.0, 0.3))
    return (jnp.mean(jax.nn.softplus(-real)) + jnp.mean(jax.nn.softplus(fake))) / 2


@of("google-research/multinerf: internal/train_utils.py")
def nerf(p, b):
    density = jax.nn.softplus(hidden(p, b["seq"]) @ p["value"])
    steps = jnp.diff(jnp.cumsum(jax.nn.softplus(b["reward"]), 1), axis=1, append=10.0)
    alpha = 1 - jnp.exp(-density * steps)
    through = jnp.exp(-jnp.cumsum(density * steps, 1) + density * steps)
    colour = jnp.sum((alpha * through)[..., None] * jax.nn.sigmoid(b["seq"] @ p["up"]), 1)
    return jnp.mean(jnp.sqrt((colour[:, :3] - b["y"]) ** 2 + 1e-6))


@of("google-deepmind/alphafold: alphafold/model/all_atom.py")
def frame_aligned_error(p, b):
    points = b["seq"][..., :3] + token_logits(p, b)[..., :3]
    relative = points[:, :, None] - points[:, None, :]
    truth = b["seq"][:, :, None, :3] - b["seq"][:, None, :, :3]
    distance = jnp.sqrt(jnp.sum((relative - truth) ** 2, -1) + 1e-4)
    pairs = b["mask"][:, :, None] * b["mask"][:, None, :]
    per_row = jnp.sum(jnp.minimum(distance, 10.0) * pairs, (1, 2)) / jnp.sum(pairs, (1, 2))
    return per_row.mean()


# --- graphs, sequences, other libraries -----------------------------------------------------------


@of("google-deepmind/jraph: jraph/examples/higgs_detection.py")
def graph_network(p, b):
    def one(nodes, senders, receivers, label):
        messages = jnp.tanh(nodes[senders] @ p["up"])
        summed = jax.ops.segment_sum(messages, receivers, LENGTH)
        graph = jnp.mean(nodes + summed, 0)
        return optax.softmax_cross_entropy_with_integer_labels(graph @ p["down"], label)

    return jnp.mean(jax.vmap(one)(b["seq"], b["senders"], b["receivers"], b["label"]))


@of("patrick-kidger/equinox: docs/examples/train_rnn.ipynb")
def equinox_recurrent(p, b):
    def one(row, label):
        last, _ = jax.lax.scan(
            lambda h, x: (jnp.tanh(x @ p["up"] + h @ p["square"]), None), jnp.zeros(6), row
        )
        return optax.sigmoid_binary_cross_entropy(last @ p["value"], (label > 0).astype(float))

    return jnp.mean(jax.vmap(one)(b["seq"], b["label"]))


@of("patrick-kidger/equinox: docs/examples/mnist.ipynb")
def equinox_classifier(p, b):
    pool = eqx.nn.MaxPool2d(kernel_size=2)
    rows = jax.vmap(lambda image: pool(image.transpose(2, 0, 1)).reshape(-1)[:FEATURES])
    log_p = jax.nn.log_softmax(logits_of(p, rows(b["image"])))
    return -jnp.mean(jnp.take_along_axis(log_p, jnp.expand_dims(b["label"], 1), axis=1))


@of("google-deepmind/dm-haiku: examples/rnn/train.py")
def haiku_recurrent(p, b):
    inputs = b["seq"].swapaxes(0, 1)

    def step(state, x):
        gates = jax.nn.sigmoid(x @ p["up"])
        state = gates * state + (1 - gates) * jnp.tanh(x @ p["square"])
        return state, state

    _, outputs = jax.lax.scan(step, jnp.zeros((inputs.shape[1], 6)), inputs)
    log_p = jax.nn.log_softmax(outputs @ p["head"])
    targets = hk.one_hot(b["targets"].swapaxes(0, 1), FEATURES)
    return -jnp.sum(log_p * targets) / (inputs.shape[0] * inputs.shape[1])


@of("google/flax: examples/lm1b/train.py")
def linen_norm_and_attention(p, b):
    x = linen.LayerNorm().apply({"params": {"scale": p["scale"], "bias": p["bias"]}}, b["seq"])
    heads = x.reshape(*x.shape[:2], 2, 3)
    mixed = linen.dot_product_attention(heads, heads, heads).reshape(x.shape)
    return jnp.mean((mixed @ p["square"] - b["seq"]) ** 2)


@of("google/flax: examples/gemma/transformer.py")
def nnx_rotary_and_gate(p, b):
    angles = jnp.arange(LENGTH)[:, None] / 10.0 ** (jnp.arange(3) / 3)
    first, second = jnp.split(b["seq"], 2, -1)
    turned = jnp.concatenate(
        [
            first * jnp.cos(angles) - second * jnp.sin(angles),
            second * jnp.cos(angles) + first * jnp.sin(angles),
        ],
        -1,
    )
    gated = nnx.gelu(turned @ p["up"]) * (turned @ p["square"])
    root = jax.lax.rsqrt(jnp.mean(gated**2, -1, keepdims=True) + 1e-6)
    return jnp.mean(optax.l2_loss(gated * root * (1 + p["scale"]), b["seq"]))


@of("google-deepmind/jraph: jraph/examples/hamiltonian_graph_network.py")
def hamiltonian(p, b):
    def energy(state):
        return jnp.sum(hidden(p, state) @ p["value"])

    slopes = jax.vmap(jax.grad(energy))(b["x"])
    position, momentum = jnp.split(slopes, 2, -1)
    return jnp.mean((jnp.concatenate([momentum, -position], -1) - b["other"]) ** 2)


@of("google-research/t5x: t5x/contrib/moe/models.py")
def mixture_of_experts(p, b):
    gates = jax.nn.softmax(b["x"] @ p["down"])
    weight, chosen = jax.lax.top_k(gates, 2)
    experts = jnp.tanh(jnp.einsum("bd,cde->bce", b["x"], jnp.stack([p["up"]] * CLASSES)))
    picked = jnp.take_along_axis(experts, chosen[..., None], axis=1)
    return jnp.mean((jnp.sum(picked * weight[..., None], 1) - b["other"]) ** 2)


@mixing("google-research/t5x: t5x/contrib/moe/models.py")
def load_balanced_experts(p, b):
    gates = jax.nn.softmax(b["x"] @ p["down"])
    share = jnp.mean(jax.nn.one_hot(jnp.argmax(gates, -1), CLASSES), 0)
    return mixture_of_experts(p, b) + 0.01 * CLASSES * jnp.sum(share * jnp.mean(gates, 0))


# --- the kinds of issue 61 ------------------------------------------------------------------------


@kind
def ranking_softmax_loss(p, b):
    return optax.losses.ranking_softmax_loss(token_logits(p, b)[..., 0], b["reward"])


@kind
def density_of_a_normal(p, b):
    covariance = p["small"] @ p["small"].T + jnp.eye(CLASSES)
    density = jax.scipy.stats.multivariate_normal.logpdf
    return -jnp.mean(density(logits_of(p, b["x"]), p["mean"], covariance))


@kind
def density_of_a_normal_of_each_row(p, b):
    def one(row, matrix):
        covariance = matrix @ matrix.T + jnp.eye(CLASSES)
        return jax.scipy.stats.multivariate_normal.logpdf(row, p["mean"], covariance)

    return -jnp.mean(jax.vmap(one)(logits_of(p, b["x"]), b["matrix"]))


def definite(matrix: Any) -> Any:
    return matrix @ matrix.swapaxes(-1, -2) + 2 * jnp.eye(CLASSES)


@kind
def inverse_of_each_row(p, b):
    inverses = jnp.linalg.inv(definite(b["matrix"]))
    return jnp.mean(jnp.einsum("bij,bj->bi", inverses, logits_of(p, b["x"])) ** 2)


@kind
def solution_of_each_row(p, b):
    solved = jnp.linalg.solve(definite(b["matrix"]), logits_of(p, b["x"])[..., None])
    return jnp.mean(solved**2)


@kind
def vmapped_solution(p, b):
    solved = jax.vmap(jnp.linalg.solve)(definite(b["matrix"]), logits_of(p, b["x"]))
    return jnp.mean(solved**2)


@kind
def solution_with_a_shared_matrix(p, b):
    solved = jnp.linalg.solve(definite(p["small"]), logits_of(p, b["x"]).T).T
    return jnp.mean((solved - b["y"]) ** 2)


@kind
def vmapped_solution_with_a_shared_matrix(p, b):
    solved = jax.vmap(lambda row: jnp.linalg.solve(definite(p["small"]), row))(b["y"])
    return jnp.mean((solved - logits_of(p, b["x"])) ** 2)


@kind
def vmapped_convolution(p, b):
    filtered = jax.vmap(lambda row: jnp.convolve(row, p["filter"], mode="same"))(b["reward"])
    return jnp.mean((filtered - b["value"]) ** 2)


@kind
def vmapped_convolution_in_full(p, b):
    filtered = jax.vmap(lambda row, kernel: jnp.convolve(row, kernel))(b["reward"], b["y"])
    return jnp.mean(filtered**2 * p["scale"][0])


@kind
def mean_without_missing_values(p, b):
    errors = (logits_of(p, b["x"]) - b["y"]) ** 2
    return jnp.mean(jnp.nanmean(jnp.where(b["y"] > -1, errors, jnp.nan), axis=-1))


@kind
def mean_of_all_but_missing_values(p, b):
    errors = (logits_of(p, b["x"]) - b["y"]) ** 2
    return Weighted(jnp.nansum(errors), jnp.sum(~jnp.isnan(errors)))


@kind
def chunked_scan_with_checkpoint(p, b):
    rows = len(b["x"])

    @jax.checkpoint
    def chunk(total, part):
        x, y = part
        return total + jnp.sum((logits_of(p, x) - y) ** 2), None

    chunks = jax.tree.map(lambda leaf: leaf.reshape(rows // 2, 2, -1), (b["x"], b["y"]))
    return jax.lax.scan(chunk, 0.0, chunks)[0] / rows


@kind
def chunked_map_of_token_losses(p, b):
    flat = b["seq"].reshape(-1, 5, FEATURES)
    losses = jax.lax.map(jax.checkpoint(lambda x: jnp.sum(logits_of(p, x) ** 2, -1)), flat)
    return jnp.mean(losses)


@kind
def loop_over_rows_by_number(p, b):
    rows = len(b["x"])

    def add_row(i, total):
        return total + jnp.sum((logits_of(p, b["x"][i]) - b["y"][i]) ** 2)

    return jax.lax.fori_loop(0, rows, add_row, 0.0) / rows


@kind
def loop_in_each_row(p, b):
    def one(row, turns):
        def body(state):
            turn, x = state
            return turn + 1, jnp.tanh(x @ p["square"])

        return jax.lax.while_loop(lambda state: state[0] < turns, body, (0, row))[1]

    out = jax.lax.stop_gradient(jax.vmap(one)(b["x"], b["steps"]))
    return jnp.mean((out * p["scale"] - b["other"]) ** 2)
