"""Batches as people have them: torch tensors, columns of lists, mappings, numbers that all rows
share. Other batches are refused.
"""

import collections
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.compilations import compilations
from support.tiers import tiered

import shardopt as so


def shared_loss(params, batch):
    """The same number for all rows scales the error; another is an integer."""
    error = (batch["x"] @ params["w"] - batch["y"]) * batch["scale"] + batch["offset"]
    return (error**2).mean(), {"scale": batch["scale"]}


BLOCKS = so.BlockModel(
    embed=lambda outer, batch: batch["x"] * batch["scale"],
    block=lambda w, x: x + w["by"] * x,
    loss=lambda outer, x, batch: (
        (x @ outer["w"] - batch["y"] * batch["scale"] + batch["offset"]) ** 2
    ).mean(),
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 8)).astype(np.float32)
Y = RNG.normal(size=16).astype(np.float32)
W = RNG.normal(size=8).astype(np.float32)


def on_one_device(scale, offset):
    """The loss and the weights after a step of sgd(0.1)."""
    batch = {"x": X, "y": Y, "scale": scale, "offset": offset}
    (loss, _), grad = jax.jit(jax.value_and_grad(shared_loss, has_aux=True))({"w": W}, batch)
    return float(loss), W - 0.1 * np.asarray(grad["w"])


STRATEGIES = {
    "ddp": lambda: so.ddp(optax.sgd(0.1), so.make_mesh(), shared_loss),
    "fsdp": lambda: so.fsdp(
        optax.sgd(0.1),
        so.make_mesh(replica=2, data=4),
        shared_loss,
        min_shard_elements=1,
        micro_batches=2,
    ),
    "global": lambda: so.fsdp(
        optax.sgd(0.1), so.make_mesh(), shared_loss, min_shard_elements=1, view="global"
    ),
    "local_sgd": lambda: so.local_sgd(
        so.zero(
            optax.sgd(0.1),
            so.make_mesh(replica=2, data=4),
            shared_loss,
            stage=2,
            min_shard_elements=1,
        ),
        sync_every=1,
    ),
}


@pytest.mark.parametrize("name", tiered(STRATEGIES, lambda name: name in ("fsdp", "global")))
def test_numbers_that_all_rows_share(name):
    """Python's, numpy's and jax's; another value is not another program."""
    opt = STRATEGIES[name]()
    state = opt.init({"w": W})
    evaluate = so.training.evaluation(
        opt, [{"x": X[:9], "y": Y[:9], "scale": 0.5, "offset": np.int32(1)}]
    )
    nine = float((((X[:9] @ W - Y[:9]) * 0.5 + 1) ** 2).mean())
    assert evaluate(state)["val_loss"] == pytest.approx(nine, rel=1e-5)
    loss, w = on_one_device(0.5, 1)
    state, metrics = opt.step(state, {"x": X, "y": Y, "scale": 0.5, "offset": np.int32(1)})
    assert (float(metrics["loss"]), float(metrics["scale"])) == pytest.approx((loss, 0.5), rel=1e-5)
    np.testing.assert_allclose(state.params["w"], w, rtol=1e-5)
    with compilations() as compiled:
        opt.step(state, {"x": X, "y": Y, "scale": 0.25, "offset": np.int32(2)})
    assert compiled == []


def test_stages_share_numbers_too():
    mesh = so.make_mesh(data=2, pipeline=2, devices=jax.devices()[:4])
    opt = so.hybrid(optax.sgd(0.1), mesh, BLOCKS, micro_batches=2)
    state = opt.init({"blocks": {"by": np.array([1.0, 0.5], np.float32)}, "w": W})
    _, metrics = opt.step(state, {"x": X, "y": Y, "scale": jnp.float32(0.5), "offset": 1})
    wanted = ((3 * 0.5 * X @ W - Y * 0.5 + 1) ** 2).mean()
    assert float(metrics["loss"]) == pytest.approx(float(wanted), rel=1e-5)


class Tensor:
    """What shardopt knows of a torch tensor; torch itself is tried where it is installed."""

    def __init__(self, array):
        self.array = array
        self.shape = array.shape
        self.dtype = "torch.float32"

    def detach(self):
        return self

    def cpu(self):
        return self

    def numpy(self):
        return self.array


class Lazy:
    """A frame, an image: it can be read as an array."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


@pytest.mark.parametrize(
    "convert",
    [
        lambda x, y: {"x": Tensor(x), "y": Tensor(y)},
        lambda x, y: {"x": x.tolist(), "y": y.tolist()},
        lambda x, y: collections.UserDict(x=Lazy(x), y=list(y)),
    ],
    ids=["torch", "lists", "mapping"],
)
def test_what_can_be_read_as_arrays(convert):
    opt = STRATEGIES["ddp"]()
    loss, _ = on_one_device(1.0, 0)
    batch = convert(X, Y)
    batch["scale"], batch["offset"] = 1.0, 0
    _, metrics = opt.step(opt.init({"w": W}), batch)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-6)


@pytest.mark.slow
def test_batches_of_a_torch_loader_train():
    """A DataLoader's lists, and bfloat16, which numpy does not know."""
    torch = pytest.importorskip("torch", reason="torch is of the extra bench")
    opt = so.ddp(
        optax.sgd(0.1),
        so.make_mesh(),
        lambda params, batch: ((batch[0] @ params) ** 2 * batch[1]).mean(),
    )
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.from_numpy(X), torch.ones(16, dtype=torch.bfloat16)),
        batch_size=16,
    )
    result = so.fit(opt, opt.init(jnp.asarray(W)), loader, num_steps=1, log_every=1, progress=False)
    assert result.history[0]["loss"] == pytest.approx(float(((X @ W) ** 2).mean()), rel=1e-5)


@dataclasses.dataclass
class Batch:
    x: np.ndarray


@pytest.mark.parametrize(
    ("batch", "kind", "message"),
    [
        (
            {
                "x": X,
                "text": ["a"] * 16,
                "raw": "abc",
                "when": np.zeros(16, "M8[s]"),
                "f": print,
                "label": [None, 1],
            },
            TypeError,
            (
                "ddp: batch leaves must be arrays [global batch, ...], or numbers that all rows"
                " share.\n  f: builtin_function_or_method\n  label: a list of NoneType and int;"
                " make numbers of it, or leave it out\n  raw: text (str); tokenize it, or leave it"
                " out\n  text: a list of str; make numbers of it, or leave it out\n  when: an array"
                " of dtype datetime64[s]"
            ),
        ),
        (
            Batch(X),
            TypeError,
            (
                "ddp: batch leaves must be arrays [global batch, ...], or numbers that all rows"
                " share.\n  batch: the dataclass Batch; register it with"
                " jax.tree_util.register_dataclass"
            ),
        ),
        (
            collections.UserDict(inner=collections.UserDict(ids=[[1, 2, 3], [4], [5, 6]])),
            ValueError,
            (
                "ddp: lists in a batch must be as long as each other.\n  inner/ids: lists of 1, 2,"
                " 3 values\nFix: pad them."
            ),
        ),
        (
            {"scale": 1.0},
            ValueError,
            (
                "ddp: no batch leaf has rows.\n  scale: shape (); no rows\nFix: give leaves the"
                " shape [global batch, ...]."
            ),
        ),
    ],
)
def test_bad_input_is_refused(batch, kind, message):
    opt = STRATEGIES["ddp"]()
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        opt.step(opt.init({"w": W}), batch)
