"""Round trips: every strategy onto every other, and what does not fit named leaf by leaf."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.compilations import compilations
from support.tiers import tiered

import shardopt as so
from shardopt.checkpoint._read import restore
from shardopt.checkpoint._write import save

PLACES = {
    "fsdp-8": (so.fsdp, {"data": 8}),
    "fsdp-4x2": (so.fsdp, {"data": 4, "tensor": 2}),
    "fsdp-replica2x4": (so.fsdp, {"replica": 2, "data": 4}),
    "ddp-8": (so.ddp, {"data": 8}),
    "ddp-2x4": (so.ddp, {"data": 2, "tensor": 4}),
    "zero1-4": (so.zero, {"data": 4}),
    "ddp-1": (so.ddp, {"data": 1}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, make_opt, new_params, steps_on):
    """Return a function from a place to (folder with step 2 saved from there, state after step 4
    there).
    """
    saves = {}

    def at(place):
        if place not in saves:
            strategy, sizes = PLACES[place]
            opt = make_opt(strategy, **sizes)
            folder = tmp_path_factory.mktemp(place)
            state = steps_on(opt, opt.init(new_params()), 0, 2)
            save(folder, state)
            values = jax.tree.map(np.array, state)
            saves[place] = folder, values, jax.tree.map(np.array, steps_on(opt, state, 2, 5))
        return saves[place]

    return at


@pytest.mark.parametrize("source", tiered(PLACES, lambda place: place == "fsdp-4x2"))
def test_same_place_goes_on_bit_for_bit(source, saved, make_opt, steps_on, same):
    folder, _, final = saved(source)
    strategy, sizes = PLACES[source]
    # has seen nothing: parameters come from the checkpoint's description
    opt = make_opt(strategy, **sizes)
    assert same(steps_on(opt, restore(folder, opt), 2, 5), final)


@pytest.mark.parametrize(
    ("source", "target"),
    tiered(
        [
            ("fsdp-8", "zero1-4"),
            ("zero1-4", "ddp-1"),
            ("ddp-1", "fsdp-8"),
            ("fsdp-8", "ddp-8"),
            ("ddp-8", "zero1-4"),
            ("fsdp-8", "fsdp-4x2"),
            ("fsdp-4x2", "ddp-1"),
            ("fsdp-4x2", "ddp-2x4"),
            ("ddp-2x4", "fsdp-replica2x4"),
            ("fsdp-replica2x4", "fsdp-8"),
        ],
        quick=lambda row: row == ("fsdp-4x2", "ddp-2x4"),
        fast=lambda row: row == ("fsdp-8", "zero1-4"),
    ),
)
def test_other_place_holds_the_same_values_and_goes_on(
    source, target, saved, make_opt, new_params, steps_on, same
):
    folder, values, final = saved(source)
    strategy, sizes = PLACES[target]
    opt = make_opt(strategy, **sizes)
    state = restore(folder, opt)
    assert same(state, values)
    wanted = opt.abstract_state(new_params())
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(
        lambda leaf: leaf.sharding, wanted
    )
    for continued_leaf, expected in zip(
        jax.tree.leaves(steps_on(opt, state, 2, 5)), jax.tree.leaves(final), strict=True
    ):
        np.testing.assert_allclose(np.asarray(continued_leaf), expected, rtol=2e-5, atol=2e-6)


def test_the_restored_state_compiles_nothing_new(saved, make_opt, new_params, steps_on):
    folder, _, _ = saved("fsdp-8")
    opt = make_opt()
    with compilations() as fresh:
        steps_on(opt, opt.init(new_params()), 0, 1)
    state = restore(folder, opt)
    with compilations() as compile_messages:
        steps_on(opt, state, 2, 3)
    assert any("jit(step)" in text for text in fresh)
    assert compile_messages == []


def test_orbax_alone_reads_it(saved):
    import orbax.checkpoint as ocp

    folder, values, _ = saved("fsdp-8")
    flat = [np.asarray(x) for x in jax.tree.leaves(values)]
    mesh = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.StandardCheckpointer() as reader:
        tree = reader.metadata(folder / "2" / "state").item_metadata.tree
        target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=mesh), tree
        )
        tree_of_orbax = reader.restore(folder / "2" / "state", target)
    assert tree_of_orbax["params"]["layer%2E0"].keys() == {"up%2Fw", "b"}
    np.testing.assert_array_equal(
        tree_of_orbax["params"]["layer%2E0"]["up%2Fw"], values.params["layer.0"]["up/w"]
    )
    np.testing.assert_array_equal(
        tree_of_orbax["opt_state"]["0"]["mu"]["down"]["0"], values.opt_state[0].mu["down"][0]
    )
    assert len(jax.tree.leaves(tree_of_orbax)) == len(flat)
    with ocp.CheckpointManager(folder, item_names=("state",)) as manager:
        assert manager.all_steps() == [2]


def test_the_record_has_step_versions_and_leaves(saved):
    folder, _, _ = saved("fsdp-4x2")
    record = json.loads((folder / "2" / "shardopt.json").read_text())
    assert record["format"] == 1
    assert record["step"] == 2
    assert record["versions"].keys() == {"shardopt", "jax", "optax", "orbax-checkpoint"}
    assert record["leaves"]["params/layer%2E0/up%2Fw"] == {"dtype": "float32", "shape": [16, 32]}
    assert record["params"]["keys"] == ["down", "layer", "layer.0"]


def test_all_dtypes_keys_and_empty_arrays_come_back(tmp_path, make_opt, same):
    dtypes = [
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int4",
        "uint8",
        "int32",
        "bool",
        "complex64",
    ]
    opt = make_opt(so.ddp, data=8)
    sharded = NamedSharding(opt.mesh, P("data"))
    tree = {name: jax.device_put(jnp.arange(16).astype(name), sharded) for name in dtypes}
    tree |= {
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "scalar": jnp.float32(3),
        "host": np.arange(3, dtype=np.int16),
    }
    tree |= {
        "key": jax.random.key(3),
        "keys": jax.device_put(jax.random.split(jax.random.key(4, impl="rbg"), 8), sharded),
    }
    save(tmp_path, tree, step=0)
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=getattr(x, "sharding", NamedSharding(opt.mesh, P()))
        ),
        tree,
    )
    restored = restore(tmp_path, wanted)

    def integers(tree):
        return {k: jax.random.key_data(v) if k.startswith("key") else v for k, v in tree.items()}

    assert same(integers(restored), integers(tree))
    assert restored["keys"].dtype == tree["keys"].dtype
    assert restored["keys"].sharding.is_equivalent_to(sharded, 1)


def test_float64_stays_float64(tmp_path, make_opt, new_params, steps_on, x64, same):
    opt = make_opt(so.fsdp, data=4)
    params = jax.tree.map(lambda x: x.astype(np.float64), new_params())
    state = opt.init(params)
    save(tmp_path, state)
    assert same(restore(tmp_path, make_opt(so.ddp, data=2)), jax.tree.map(np.array, state))


CHAINS = {
    "adamw": lambda: optax.adamw(1e-2),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "sgd": lambda: optax.sgd(1e-2),
    "clipped adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
}
SAME_CHAIN = (
    "Fix: build opt with the optax chain that the checkpoint was saved with; or pass"
    " new_chain=True (to Checkpoints resume='new_chain'), which keeps the states that both chains"
    " have."
)


@pytest.mark.parametrize(
    ("chain", "counts", "lines"),
    [
        (
            "momentum",
            "4 leaves missing, 9 left over, 0 different",
            [
                "opt_state/0/trace/down/0: float32[32, 8], missing from the checkpoint",
                "opt_state/0/trace/layer/0: float32[3, 5], missing from the checkpoint",
                "opt_state/0/trace/layer.0/b: float32[32], missing from the checkpoint",
                "opt_state/0/trace/layer.0/up/w: float32[16, 32], missing from the checkpoint",
                "opt_state/0/count: int32[], left over in the checkpoint",
                "opt_state/0/mu: 4 leaves left over in the checkpoint",
                "opt_state/0/nu: 4 leaves left over in the checkpoint",
            ],
        ),
        (
            "sgd",
            "0 leaves missing, 9 left over, 0 different",
            [
                "opt_state/0/count: int32[], left over in the checkpoint",
                "opt_state/0/mu/down/0: float32[32, 8], left over in the checkpoint",
                "opt_state/0/mu/layer/0: float32[3, 5], left over in the checkpoint",
                "opt_state/0/mu/layer.0: 2 leaves left over in the checkpoint",
                "opt_state/0/nu/down/0: float32[32, 8], left over in the checkpoint",
                "opt_state/0/nu/layer/0: float32[3, 5], left over in the checkpoint",
                "opt_state/0/nu/layer.0: 2 leaves left over in the checkpoint",
            ],
        ),
        (
            "clipped adamw",
            "9 leaves missing, 9 left over, 0 different",
            [
                "opt_state/1/0/count: int32[], missing from the checkpoint",
                "opt_state/1/0/mu: 4 leaves missing from the checkpoint",
                "opt_state/1/0/nu: 4 leaves missing from the checkpoint",
                "opt_state/0/count: int32[], left over in the checkpoint",
                "opt_state/0/mu: 4 leaves left over in the checkpoint",
                "opt_state/0/nu: 4 leaves left over in the checkpoint",
            ],
        ),
    ],
)
def test_another_chain_is_named(chain, counts, lines, saved, make_opt, complaint_of):
    folder, _, _ = saved("fsdp-8")
    message = complaint_of(lambda: restore(folder, make_opt(tx=CHAINS[chain]())))
    listed = "".join(f"  {line}\n" for line in lines)
    assert (
        message == f"restore: step 2 in {folder} does not fit opt: {counts}.\n{listed}{SAME_CHAIN}"
    )


def test_another_model_is_named(saved, make_opt, new_params, complaint_of, monkeypatch):
    folder, _, _ = saved("fsdp-8")
    params = new_params()
    params["down"] = [params["down"][0].astype(jnp.bfloat16), np.ones(2, np.float32)]
    params["layer"]["0"] = np.ones((3, 6), np.float32)
    del params["layer.0"]["b"]
    opt = make_opt(tx=optax.sgd(0.1))
    monkeypatch.setattr("shardopt.checkpoint._store.read_arrays", None)  # nothing may be read
    other = make_opt(so.ddp, tx=optax.sgd(0.1))
    save(folder / "plain", other.init(new_params()), step=0)
    message = complaint_of(
        lambda: restore(folder / "plain", opt, abstract_params=jax.eval_shape(lambda: params))
    )
    assert (
        message
        == f"restore: step 0 in {folder}/plain does not fit opt: 1 leaf missing, 1 left over, 2"
        " different.\n  params/down/0: the checkpoint holds float32[32, 8], opt wants"
        " bfloat16[32, 8]\n  params/layer/0: the checkpoint holds float32[3, 5], opt wants"
        " float32[3, 6]\n  params/down/1: float32[2], missing from the checkpoint\n "
        " params/layer.0/b: float32[32], left over in the checkpoint\nFix: build opt for the"
        " model and the optax chain that the checkpoint was saved with; or pass new_chain=True, and"
        " as params= parameters with the leaves that the checkpoint does not have."
    )


def test_parameters_that_cannot_be_rebuilt_are_asked_for(tmp_path, make_opt, complaint_of, same):
    from flax import nnx

    graph, params = nnx.split(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), nnx.Param)

    def loss(params, batch):
        return jnp.mean(nnx.merge(graph, params)(batch) ** 2)

    state = make_opt(so.fsdp, loss=loss).init(params)
    save(tmp_path, state)
    opt = make_opt(so.ddp, loss=loss)
    message = complaint_of(lambda: restore(tmp_path, opt))
    assert re.fullmatch(
        r"restore: opt has not seen parameters yet, and theirs cannot be rebuilt from the"
        r" checkpoint: it holds these "
        r"types\.\n(  flax\.nnx\.[\w.]+\n)+"
        r"Fix: pass abstract_params= \(jax\.eval_shape\(init_fn, rng\) gives them\), or call"
        r" opt\.init or opt\.specs "
        r"first\.",
        message,
    )
    assert same(restore(tmp_path, opt, abstract_params=params), jax.tree.map(np.array, state))


def test_an_abstract_state_is_filled_as_it_is_placed(
    saved, make_opt, new_params, complaint_of, same
):
    folder, values, _ = saved("fsdp-8")
    opt = make_opt(so.zero, data=4)
    wanted = opt.abstract_state(new_params())
    restored = restore(folder, wanted)
    assert same(restored, values)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(
        lambda leaf: leaf.sharding, wanted
    )
    with so.Checkpoints(folder, 1, None) as checkpoints:
        assert same(checkpoints.restore(wanted)[0], values)
    other = jax.ShapeDtypeStruct((), jnp.float32, sharding=wanted.step.sharding)
    assert (
        complaint_of(lambda: restore(folder, wanted._replace(step=other)))
        == f"restore: step 2 in {folder} does not fit the abstract state: 0 leaves missing, 0 left"
        " over, 1 different.\n  step: the checkpoint holds int32[], the abstract state wants"
        " float32[]\nFix: pass key paths, shapes and dtypes that were saved; of a part in a dict,"
        ' such as {"params": ...}.'
    )


@pytest.mark.parametrize(
    ("target", "listed"),
    [
        (None, ""),
        ("opt", "  target: str\n"),
        (
            {"w": jax.ShapeDtypeStruct((2,), jnp.float32), "b": np.ones(2)},
            "  b: ndarray\n  w: ShapeDtypeStruct without a sharding\n",
        ),
    ],
)
def test_a_target_without_shapes_or_shardings_is_refused(target, listed, tmp_path, complaint_of):
    requirement = "target must be an optimizer, or a pytree of jax.ShapeDtypeStruct with shardings."
    fix = (
        "Fix: pass opt, or opt.abstract_state(abstract_params); or make leaves by"
        " jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, spec))."
    )
    assert (
        complaint_of(lambda: restore(tmp_path, target), TypeError)
        == f"restore: {requirement}\n{listed}{fix}"
    )


def test_a_file_is_no_folder(tmp_path, trained, complaint_of):
    for name in ("model.safetensors", "checkpoint_3", "state.msgpack", "empty_1"):
        file = tmp_path / name
        file.write_bytes(b"" if name == "empty_1" else b"text")
        assert (
            complaint_of(lambda file=file: restore(file, trained[0]), so.errors.StepNotFoundError)
            == f"restore: {file} is a file, and checkpoints are folders.\nFix: pass the folder that"
            " was given to save or Checkpoints."
        )


def test_an_abstract_state_has_its_parameters_already(tmp_path, trained, complaint_of):
    wanted = trained[0].abstract_state(trained[1]().params)
    message = complaint_of(
        lambda: restore(tmp_path, wanted, abstract_params=wanted.params), TypeError
    )
    assert message == "restore: abstract_params are for an optimizer, not for an abstract state."


def test_a_missing_checkpoint_or_step_is_named(tmp_path, trained, complaint_of):
    opt, state = trained

    def missing(*args, **how):
        return complaint_of(lambda: restore(*args, **how), so.errors.StepNotFoundError)

    nowhere = tmp_path / "nowhere"
    assert (
        missing(nowhere, opt)
        == f"restore: there is no checkpoint in {nowhere}, which does not exist.\n"
        "Fix: pass the folder that was given to save or Checkpoints."
    )
    assert (
        missing(tmp_path, opt)
        == f"restore: there is no checkpoint in {tmp_path}.\nFix: pass the folder that was given to"
        " save or Checkpoints."
    )
    save(tmp_path, state(), step=5)
    (tmp_path / ".saving-7.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "08").mkdir()
    assert (
        missing(tmp_path, opt, step=6)
        == f"restore: there is no step 6 in {tmp_path}.\nFix: choose one of the steps 5, or leave"
        " step out for the newest."
    )
    assert (
        missing(tmp_path, opt, step=7)
        == f"restore: there is no step 7 in {tmp_path}: its save was interrupted.\n"
        "Fix: choose one of the steps 5, or leave step out for the newest."
    )
    assert (
        missing(tmp_path / "5", opt)
        == f"restore: {tmp_path}/5 is the folder of one step, not of a run.\nFix: pass"
        f" {str(tmp_path)!r} and step=5."
    )
    assert int(restore(tmp_path, opt).step) == 3
