"""`--mesh` of anything: a mesh over all devices, or an error that says which part cannot be read."""

import math

import jax
import pytest
from hypothesis import strategies as st
from support.fuzz import COUNTS, fuzz, outcome

from shardopt.cli._strategy import mesh_of, parse_mesh
from shardopt.core._errors import calling

pytestmark = pytest.mark.fast

sizes = st.sampled_from(
    [
        "-1",
        "0",
        "1",
        "2",
        "4",
        "8",
        "-2",
        "--1",
        "+2",
        "1_0",
        " 2 ",
        "2.0",
        "٤",
        "²",
        "1e1",
        "9" * 5000,
        "",
    ]
)
parts = st.tuples(
    st.sampled_from(["data", "tensor", "pipeline", "replica", "Data", " data", "model", ""]),
    st.sampled_from(["=", "=", "=", "", "==", ":"]),
    sizes | st.integers().map(str),
).map("".join)
strings = (
    st.lists(parts, max_size=5).map(",".join)
    | st.text(max_size=30)
    | st.text("datensorplic=,-0123456789 \t\n\0", max_size=40)
    | st.just("auto")
)


@pytest.mark.parametrize("count", COUNTS)
def test_mesh_takes_anything(count):
    devices = jax.devices()
    mesh_texts = []

    def prop(text, pipelined):
        mesh, message = outcome(
            lambda: calling("train")(mesh_of)(text, devices, pipelined=pipelined),
            "train",
            "make_mesh",
        )
        if message is None:
            mesh_texts.append(text)
            assert mesh.size == len(devices) == math.prod(mesh.shape.values())

    fuzz(prop, strings, st.booleans(), count=count)
    assert any("=" in text for text in mesh_texts)


def test_a_number_that_python_refuses_to_read_is_named_as_the_others_are():
    _, message = outcome(lambda: calling("train")(parse_mesh)(f"data={'9' * 5000}"), "train")
    assert "the size must be an integer" in message
