"""HLO lines as compilers write them: shapes, layouts, attributes, sizes."""

import re

import pytest

from shardopt.hlo._hlo_text import (
    arrays,
    attributes,
    elements,
    nbytes,
    operands,
    parse,
    tiled_nbytes,
)

pytestmark = pytest.mark.fast

LINES = r"""HloModule jit_f, is_scheduled=true, num_partitions=2

FileNames
1 "/a = b(c)/f.py"

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%x, %y)
}, execution_thread="main"

ENTRY %main.1_spmd (p: (f32[2], s32[])) -> f32[8,4] {
  %p = (f32[2]{0}, /*index=1*/s32[]{:T(128)}) parameter(0), metadata={op_name="state[\'a\'], \"odd\" (name"}
  %c = s32[2]{0} constant({1, 2})
  %k = f32[8,4]{1,0:T(8,128)(2,1)S(1)} custom-call(%p, f32[2]{0} %c), custom_call_target="x", metadata={op_name="a, b=c"}
  ROOT %r = f32[8,4]{1,0} all-reduce(%k), channel_id=3, replica_groups=mesh['a'=2], device_ids=(1,0) {'a'}, to_apply=%add
}
"""


def test_parse_finds_the_lines_of_every_computation():
    module = parse(LINES)
    assert module.entry == "main.1_spmd"
    assert {name: [line.name for line in lines] for name, lines in module.computations.items()} == {
        "add": ["x", "y", "add.1"],
        "main.1_spmd": ["p", "c", "k", "r"],
    }
    first, second, third, last = module.computations["main.1_spmd"]
    assert (first.shape, first.opcode, first.is_root) == (
        "(f32[2]{0}, s32[]{:T(128)})",
        "parameter",
        False,
    )
    assert (second.shape, second.opcode) == ("s32[2]{0}", "constant")
    assert operands(third) == ["p", "c"]
    assert attributes(third) == {"custom_call_target": '"x"', "metadata": '{op_name="a, b=c"}'}
    assert last.is_root
    assert attributes(last)["replica_groups"] == "mesh['a'=2], device_ids=(1,0) {'a'}"
    assert attributes(last)["to_apply"] == "%add"


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("module @jit_f attributes {}", "HloModule line"),
        ("HloModule f\n\nf {\n  a = f32[] parameter(0)\n}", "entry computation"),
    ],
)
def test_what_is_not_hlo_is_refused(text, lacks):
    message = (
        f"audit: this is not the text of an HLO module: it has no {lacks}.\n"
        "Fix: pass compiled.as_text(), or the compiled program itself."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse(text)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[8,4]{1,0}", 128),
        ("f32[]", 4),
        ("f32[0,4]", 0),
        ("bf16[8,4]{1,0:T(8,128)(2,1)S(1)}", 64),
        ("pred[3]", 3),
        ("f8e4m3fn[16]", 16),
        ("f8e8m0fnu[16]", 16),
        ("f4e2m1fn[16]", 8),
        ("s4[3]{0:E(4)}", 2),
        ("u2[5]", 2),
        ("c128[2]", 32),
        ("s64[2]", 16),
        ("f32[<=8,2]", 64),
        ("token[]", 0),
        ("((f32[4]{0}, u8[3]), (bf16[2]), u32[])", 16 + 3 + 4 + 4),
        ("()", 0),
    ],
)
def test_shapes_have_their_bytes(shape, size):
    assert nbytes(shape) == size


def test_tuples_are_split_into_elements_and_arrays():
    shape = "((f32[4]{0}, f32[2,2]{1,0:T(8,128)}), (f32[8]{0}), u32[])"
    assert elements(shape) == ("(f32[4]{0}, f32[2,2]{1,0:T(8,128)})", "(f32[8]{0})", "u32[]")
    assert arrays(shape) == ["f32[4]", "f32[2,2]", "f32[8]", "u32[]"]
    assert elements("f32[4]{0}") == ("f32[4]{0}",)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("blob[4]", "audit: unknown HLO element type 'blob'."),
        ("f32(4)", "audit: cannot read the HLO shape 'f32(4)'."),
    ],
)
def test_unknown_shapes_are_refused(shape, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        nbytes(shape)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[16,256]{1,0:T(8,128)}", 16 * 256 * 4),
        ("f32[100,12]{0,1:T(8,128)}", 16 * 128 * 4),
        ("f32[3,100,12]{2,1,0:T(8,128)}", 3 * 104 * 128 * 4),
        ("bf16[8,4]{1,0:T(8,128)(2,1)S(1)}", 8 * 128 * 2),
        ("f32[12]{0:T(128)}", 128 * 4),
        ("s32[]{:T(128)}", 128 * 4),
        ("f32[5,3]{1,0:T(2,128)}", 6 * 128 * 4),
        ("f32[7]{0:T(8,128)}", 8 * 128 * 4),
        ("f32[5,3]{1,0}", 5 * 3 * 4),
        ("(s32[]{:T(128)}, (f32[5,3]{1,0}, token[]))", 128 * 4 + 5 * 3 * 4),
    ],
)
def test_tiles_are_filled_up(shape, size):
    assert tiled_nbytes(shape) == size


def test_metadata_over_several_lines_ends_no_computation():
    text = """HloModule m

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %kernel = f32[4]{0} custom-call(%p), custom_call_target="tpu_custom_call", metadata={op_name="kernel
}, more of its text"}
  ROOT %sum = f32[4]{0} add(%kernel, %p)
}
"""
    assert [instruction.opcode for instruction in parse(text).computations["main"]] == [
        "parameter",
        "custom-call",
        "add",
    ]
    threaded = text.replace("\n}\n", '\n}, execution_thread="sparsecore"\n')
    assert len(parse(threaded).computations["main"]) == 3
