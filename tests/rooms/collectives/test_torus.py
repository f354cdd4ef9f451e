"""What XLA:TPU makes of one fsdp step over a whole torus: gathers that are gathers, scatters that
are scatters.
"""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import shardopt as so
from benchmarks import transformer
from shardopt.collectives._tiles import in_gathered_layout
from shardopt.planning import Transformer

pytestmark = pytest.mark.fast


@pytest.mark.slow
def test_collectives_over_a_whole_torus_send_the_stated_bytes():
    """The test fails, rather than skips, if libtpu is not installed: pip install 'shardopt[tpu]'."""
    shape = Transformer("t", 1024, 2, 8, 4096, 8192, 128, num_kv_heads=8)
    report = so.planning.aot(
        lambda mesh: so.fsdp(
            optax.adamw(1e-3),
            mesh,
            transformer.model(shape, remat="full"),
            gather_dtype=jnp.bfloat16,
        ),
        shape.abstract_params(),
        transformer.abstract_batch(shape, 64),
        topology="v5p:4x4x4",
    )
    blocks = shape.num_parameters - 2 * 8192 * 1024 - 1024
    audit = report.audit
    # gathered in bfloat16, blocks twice, in a loop, and the head once; rows of the embedding are
    # exchanged
    gathered = 2 * blocks + 8192 * 1024
    assert audit.of("all-gather").total.wire_bytes == pytest.approx(
        2 * gathered * 63 / 64, rel=0.05
    )
    if jax.__version_info__ >= (0, 11):  # compiled with so.runtime.compiler_options
        scattered = audit.of("reduce-scatter").total.wire_bytes
        assert scattered == pytest.approx(
            4 * (shape.num_parameters - 8192 * 1024) * 63 / 64, rel=0.05
        )
        assert any(collective.asynchronous for collective in audit.of("all-gather").collectives)


@pytest.mark.parametrize(
    ("shape", "dim", "layouts"),
    [
        ((64, 2, 256), 2, [(1, 2, 0)]),
        ((64, 2, 256), 0, []),
        ((64, 32, 128), 2, [(2, 0, 1)]),
        ((64, 256), 1, []),
    ],
    ids=str,
)
def test_a_weight_is_read_as_it_arrives(shape, dim, layouts):
    equations = jax.make_jaxpr(lambda x: in_gathered_layout(x, dim))(jnp.zeros(shape)).eqns
    assert [equation.params["layout"].major_to_minor for equation in equations] == layouts


@pytest.mark.slow
@pytest.mark.parametrize(
    "hidden", [4096, 4128], ids=["gathered on hidden units", "gathered by rows"]
)
def test_hidden_units_that_are_kept_are_not_copied(hidden):
    """Fails where libtpu is not installed."""
    shape = Transformer("t", 1024, 3, 8, hidden, 6400, 2048, num_kv_heads=8)
    remat = "save:qkv,attention,attention_out,mlp_hidden"
    options = {"gather_dtype": jnp.bfloat16, "reducer": so.reducers.exact(jnp.bfloat16)}
    report = so.planning.aot(
        lambda mesh: so.fsdp(
            optax.sgd(0.1), mesh, transformer.model(shape, remat=remat), **options
        ),
        shape.abstract_params(),
        transformer.abstract_batch(shape, 64),
        topology="v5p:4x4x4",
    )
    copied = re.findall(
        r"%(?:copy|\S*dynamic-slice)\S* = bf16\[([\d,]+)\]\S* (?:copy|fusion)\(", report.text
    )
    sizes = [{int(size) for size in dims.split(",")} for dims in copied]
    assert not [dims for dims in sizes if dims & {1024, 2048} and dims & {hidden, 2 * hidden}], (
        copied
    )
