"""The backward kernel of splash attention: equal to plain attention's gradients, by pieces too, and
compiled for TPUs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from support.tiers import tiered

import shardopt as so
from shardopt.kernels import _splash_backward as splash_backward
from shardopt.kernels._flash import Keys, Marks, MaskRule, Queries, capped
from shardopt.nn._attention import masked_attention, visible
from shardopt.planning import topology_devices


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of attention: 4 heads of queries, and a limit to VMEM in rows."""

    length: int = 256
    heads: int = 4
    values: int = 8
    causal: bool = True
    window: int | None = None
    packed: bool = False
    rows: int | None = None
    softcap: float | None = None


CASES = {
    "tiles": Case(length=384),
    "grouped heads, narrow values": Case(heads=2, values=5),
    "window": Case(length=384, window=150),
    "packed, both ways": Case(causal=False, packed=True),
    "pieces": Case(length=256, rows=128, packed=True),
    "pieces, grouped heads": Case(length=256, rows=128, packed=True, heads=2, values=5),
    "pieces, window": Case(length=512, rows=128, window=100, heads=1),
    "soft cap": Case(length=384, softcap=0.7),
    "pieces, soft cap": Case(length=512, rows=128, window=100, softcap=0.7),
}


def gradients_of(case, monkeypatch):
    """Return the gradients by the kernel, and by plain attention."""
    T = case.length
    H = 4
    G = case.heads
    rng = np.random.default_rng(0)

    def draw(heads, width):
        return np.asarray(rng.normal(size=(2, heads, T, width)), np.float32)

    query = draw(H, 12) / 3
    key = draw(G, 12)
    value = draw(G, case.values)
    d_out = draw(H, case.values)
    segments = np.sort(rng.integers(0, 3, (2, T)), axis=1).astype(np.int32) if case.packed else None
    mask = visible(T, causal=case.causal, window=case.window)[None]
    if segments is not None:
        mask &= segments[:, :, None] == segments[:, None, :]

    def swapped(x):
        return jnp.swapaxes(x, 1, 2)

    def plain(query, key, value):
        return swapped(
            masked_attention(
                *map(swapped, (query * 12**0.5, key, value)), mask, softcap=case.softcap
            )
        )

    @jax.jit
    def in_plain_jax(query, key, value, d_out):
        out, pull = jax.vjp(plain, query, key, value)
        scores = jnp.einsum("bhtk,bhsk->bhts", query, jnp.repeat(key, H // G, axis=1))
        scores = capped(scores, case.softcap)
        logsumexp = jax.nn.logsumexp(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
        return pull(d_out), logsumexp, jnp.sum(out * d_out, -1)

    expected, logsumexp, d_sums = in_plain_jax(query, key, value, d_out)
    if case.rows:  # memory for the gradients of so many rows of one head, and a tile
        monkeypatch.setattr(splash_backward, "TILE", 128)
        monkeypatch.setattr(
            splash_backward, "vmem", lambda: (case.rows * 3 * 128 * 12 + 14 * 128**2) * 6 // 5 + 1
        )
    marks = Marks(None, segments)
    rows = Queries(query, d_out, logsumexp, d_sums, marks)
    rule = MaskRule(case.causal, case.window, case.softcap)
    by_kernel = jax.jit(
        lambda rows, keys: splash_backward.gradients(rows, keys, rule, dtype=jnp.float32)
    )
    return by_kernel(rows, Keys(key, value, marks)), expected


@pytest.mark.parametrize("case", tiered(CASES, lambda case: case == "pieces, grouped heads"))
def test_gradients_are_those_of_plain_attention(case, monkeypatch):
    for gradient, wanted in zip(*gradients_of(CASES[case], monkeypatch), strict=True):
        np.testing.assert_allclose(gradient, wanted, atol=2e-5)


def test_tiles_that_no_query_sees_are_left_out():
    tiles = splash_backward._tiles
    assert tiles(512, 0, 128, MaskRule(True, None)) == [
        (i, j) for j in range(4) for i in range(j, 4)
    ]
    assert tiles(512, 0, 128, MaskRule(True, 129)) == [
        (i, j) for j in range(4) for i in range(j, min(j + 2, 4))
    ]
    assert tiles(512, 0, 128, MaskRule(True, 130))[:4] == [(0, 0), (1, 0), (2, 0), (1, 1)]
    assert tiles(256, -256, 128, MaskRule(True, None)) == []
    assert (
        len(tiles(256, 256, 128, MaskRule(True, None)))
        == len(tiles(256, 0, 128, MaskRule(False, None)))
        == 4
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "length", "width", "kernels"),
    [
        ("v5p:2x2x1", 8192, 128, 1),
        ("v5p:2x2x1", 4096, 192, 1),
        ("v5e:2x2", 1024, 64, 1),
        ("v6e:2x2", 16384, 128, 1),
        ("v5p:2x2x1", 16384, 128, 2),  # four pieces, those on the diagonal and those below it
        ("v4:2x2x1", 2048, 128, 1),
    ],
)
def test_compiles_for_tpu_and_states_what_it_computes(topology, length, width, kernels):
    mesh = Mesh(np.ravel(topology_devices(topology)), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")

    def loss(args):
        return jnp.sum(so.nn.attention(*args, window=None).astype(jnp.float32) ** 2)

    step = jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=False
    )

    def shape(heads, width):
        return jax.ShapeDtypeStruct(
            (mesh.size, length, heads, width), jnp.bfloat16, sharding=NamedSharding(mesh, spec)
        )

    text = (
        jax.jit(step)
        .lower((shape(8, width), shape(2, width), shape(2, min(width, 128))))
        .compile()
        .as_text()
    )
    lines = [
        line for line in text.splitlines() if "splash_backward" in line and " custom-call(" in line
    ]
    stated = [float(line.split('"flops":"')[1].split('"')[0]) for line in lines]
    tiles = length // 512 * (length // 512 + 1) // 2
    assert len(lines) == kernels
    assert "splash_forward" in text
    assert "splash_mha" not in text  # jax's kernel
    if kernels == 1:
        assert sum(stated) == 2 * 512**2 * tiles * 8 * (3 * width + 2 * min(width, 128))
