"""What XLA:TPU makes of one fsdp step over a whole torus: gathers that are gathers, scatters that are scatters."""

import jax
import jax.numpy as jnp
import optax
import pytest

import shardopt as so
from shardopt.models import _transformer as transformer
from shardopt.planning import Transformer

pytestmark = pytest.mark.fast


@pytest.mark.slow
def test_collectives_over_a_whole_torus():
    """Fails, rather than skips, where libtpu is not installed: pip install 'shardopt[tpu]'."""
    shape = Transformer("t", 1024, 2, 8, 4096, 8192, 128, num_kv_heads=8)
    report = so.aot(
        lambda mesh: so.fsdp(
            optax.adamw(1e-3), mesh, transformer.model(shape, remat="full"), gather_dtype=jnp.bfloat16
        ),
        shape.abstract_params(),
        transformer.abstract_batch(shape, 64),
        topology="v5p:4x4x4",
    )
    blocks, found = shape.num_parameters - 2 * 8192 * 1024 - 1024, report.audit
    # gathered in bfloat16, blocks twice, in a loop, and the head once; rows of the embedding are exchanged
    gathered = 2 * blocks + 8192 * 1024
    assert found.of("all-gather").total.wire_bytes == pytest.approx(2 * gathered * 63 / 64, rel=0.05)
    if jax.__version_info__ >= (0, 11):  # compiled with so.compiler_options
        scattered = found.of("reduce-scatter").total.wire_bytes
        assert scattered == pytest.approx(4 * (shape.num_parameters - 8192 * 1024) * 63 / 64, rel=0.05)
        assert any(one.asynchronous for one in found.of("all-gather").collectives)
