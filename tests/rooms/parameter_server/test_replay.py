"""A log says enough to do the run again, bit for bit; and one that does not fit is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.reference import same_bits
from support.tiers import tiered

import shardopt as so
from shardopt.parameter_server import Log, SimulatedWorker, rules, simulate
from shardopt.parameter_server._log import Event

RULES = {
    "none": None,
    "staleness_learning_rate": rules.staleness_learning_rate(),
    "dc_asgd": rules.dc_asgd(),
    "delayed_nesterov": rules.delayed_nesterov(every=3),
}


@pytest.mark.parametrize(
    ("rule", "max_staleness"),
    [
        pytest.param("none", 0, marks=pytest.mark.slow),
        pytest.param("none", 2, marks=pytest.mark.fast),
        pytest.param("none", None, marks=pytest.mark.slow),
        pytest.param("delayed_nesterov", 0, marks=pytest.mark.slow),
        *tiered(
            [(rule, 1) for rule in RULES if rule != "none"],
            lambda row: row[0] in ("dc_asgd", "delayed_nesterov"),
        ),
    ],
)
def test_a_run_on_threads_is_replayed_bit_for_bit(rule, max_staleness, regression, tmp_path):
    tx = optax.adam(0.05)
    devices = jax.devices()[:1] * 3  # one program for all
    opt = so.async_sgd(
        tx, regression.loss_fn, workers=devices, max_staleness=max_staleness, rule=RULES[rule]
    )
    path = tmp_path / "logs" / "run.jsonl"
    result = opt.run(regression.params, regression.batches_of(3), num_updates=20, log_path=path)
    replayed_params = opt.replay(Log.load(path), regression.params, regression.batches_of(3))
    same_bits(replayed_params, result.params)


def replayed_simulation(regression, periods, **options):
    """Return a simulated run whose workers work in these periods, after its replay."""
    tx = optax.sgd(0.02, momentum=0.9)
    workers = [SimulatedWorker(availability=times) for times in periods]
    result = simulate(
        workers,
        tx=tx,
        loss_fn=regression.loss_fn,
        params=regression.params,
        batches_of=regression.batches_of(len(periods)),
        **options,
    )
    settings = {name: value for name, value in options.items() if name != "num_updates"}
    devices = jax.devices()[:1] * len(periods)  # one program for all
    opt = so.async_sgd(tx, regression.loss_fn, workers=devices, **settings)
    replayed_params = opt.replay(result.log, regression.params, regression.batches_of(len(periods)))
    same_bits(replayed_params, result.params)
    return result


ALWAYS = ((0.0, float("inf")),)


@pytest.mark.parametrize("max_staleness", tiered([0, 1, None], lambda bound: bound is None))
def test_runs_with_deaths_and_late_joiners_are_replayed(max_staleness, regression):
    late = ((5.5, float("inf")),)
    thrice = ((0.0, 6.5), (9.5, 12.5), (14.5, float("inf")))
    result = replayed_simulation(
        regression,
        [ALWAYS, ((0.0, 8.5),), late, thrice],
        max_staleness=max_staleness,
        rule=rules.dc_asgd(),
        num_updates=50,
    )
    events = list(result.log)
    assert [event.worker for event in events if event.kind == "leave"].count(3) == 2
    assert [event.worker for event in events if event.kind == "join"].count(3) == 3
    assert next(event.version for event in events if (event.kind, event.worker) == ("join", 2)) >= 5
    assert result.metrics["updates"] == 50


@pytest.mark.parametrize("seed", tiered(range(4), lambda seed: False))
def test_runs_with_random_kills_are_replayed(seed, regression):
    """Whoever dies when: the run ends, exactly so many updates are made, and the log explains every
    bit.
    """
    draw = np.random.default_rng(seed)
    periods = [ALWAYS]
    for _ in range(3):
        times = np.sort(draw.uniform(0, 30, size=4)).tolist()
        periods.append(((times[0], times[1]), (times[2], times[3])))
    result = replayed_simulation(regression, periods, max_staleness=seed % 3, num_updates=60)
    assert (result.metrics["stopped"], result.metrics["updates"]) == ("completed", 60)
    assert result.metrics["history"]["loss"].shape == (60,)


def test_runs_of_workers_with_several_devices_are_replayed(regression):
    devices = jax.devices()
    opt = so.async_sgd(
        optax.adam(0.05),
        regression.loss_fn,
        workers=[devices[0:2], devices[2], devices[3:5]],
        max_staleness=1,
    )
    result = opt.run(regression.params, regression.batches_of(3), num_updates=10)
    same_bits(opt.replay(result.log, regression.params, regression.batches_of(3)), result.params)


def test_skipped_updates_are_skipped_again(regression):
    def batches_of(worker):
        for index, batch in enumerate(regression.batches_of(2)(worker)):
            yield {
                **batch,
                "y": batch["y"] * np.float32("nan" if worker == 1 and index % 3 == 2 else 1.0),
            }

    opt = so.async_sgd(
        optax.adam(0.05), regression.loss_fn, workers=2, max_staleness=2, nonfinite="skip"
    )
    result = opt.run(regression.params, batches_of, num_updates=20)
    assert result.metrics["refused"] >= 2
    assert {event.worker for event in result.log if event.kind == "refuse"} == {1}
    assert np.isfinite(result.metrics["history"]["loss"]).all()
    same_bits(opt.replay(result.log, regression.params, batches_of), result.params)


def opt_of(regression, tx, *, workers=3, max_staleness=1, **options):
    """Return an optimizer that can replay a simulation."""
    devices = jax.devices()[:1] * workers
    return so.async_sgd(
        tx, regression.loss_fn, workers=devices, max_staleness=max_staleness, **options
    )


def test_settings_other_than_those_of_the_run_are_refused(simulate_really, regression, message_of):
    mine = rules.StalenessRule("halve", {"by": (2, 3)}, scale=lambda delay: jnp.float32(0.5))
    result = simulate_really(optax.sgd(0.05), max_staleness=1, rule=mine)

    def message(**options):
        opt = opt_of(regression, optax.sgd(0.05), **options)
        return message_of(
            ValueError, opt.replay, result.log, regression.params, regression.batches_of(3)
        )

    opt = opt_of(regression, optax.sgd(0.05), rule=mine)
    same_bits(opt.replay(result.log, regression.params, regression.batches_of(3)), result.params)
    had = "replay: the log is of a run with other settings.\n  "
    rule = "rule: {'name': 'halve', 'config': {'by': [2, 3]}} in the log, "
    fix = "\nFix: use the settings of the log."
    assert message() == f"{had}{rule}{{'name': 'plain', 'config': {{}}}} now{fix}"
    assert (
        message(rule=rules.dc_asgd())
        == f"{had}{rule}{{'name': 'dc_asgd', 'config': {{'strength': 0.04}}}} now{fix}"
    )
    assert (
        message(rule=mine, max_staleness=2, nonfinite="skip")
        == f"{had}max_staleness: 1 in the log, 2 now\n  nonfinite: raise in the log, skip now{fix}"
    )
    assert (
        message(rule=mine, reducer=so.reducers.int8())
        == f"{had}reducer: None in the log, {so.reducers.int8().name} now{fix}"
    )
    assert (
        message(rule=mine, workers=2)
        == "replay: the run had 3 workers, and this optimizer has 2.\n"
        "Fix: make it for the workers of the run."
    )


def test_numbers_of_numpy_in_a_rule_survive_the_file(simulate_really, regression, tmp_path):
    rule = rules.delayed_nesterov(np.int32(3), momentum=np.float64(0.9))
    simulated = simulate_really(optax.sgd(0.05), max_staleness=1, rule=rule)
    simulated.log.save(tmp_path / "log.jsonl")
    opt = opt_of(regression, optax.sgd(0.05), rule=rule)
    log = Log.load(tmp_path / "log.jsonl")
    same_bits(opt.replay(log, regression.params, regression.batches_of(3)), simulated.params)


def test_what_is_not_the_run_is_noticed(simulate_really, regression, message_of):
    result = simulate_really(optax.sgd(0.05), max_staleness=1)
    log = result.log
    params = regression.params
    batches_of = regression.batches_of(3)

    def message(log, params, batches_of, tx=None):
        opt = opt_of(regression, tx or optax.sgd(0.05))
        return message_of(ValueError, opt.replay, log, params, batches_of)

    assert (
        message(log, {**params, "b": jnp.ones(())}, batches_of)
        == "replay: the parameters are not those that the run began with.\n"
        "Fix: pass the same values in the same dtypes, or make them the same way."
    )
    for other in (optax.sgd(0.051), optax.adam(0.05)):
        assert (
            message(log, params, batches_of, other)
            == "replay: the parameters at the end are not those of the run, although they were the"
            " same at the start.\nFix: pass the data, loss and optimizer of the run; devices of"
            " another kind round differently."
        )
    short = regression.batches_of(3, rounds=0)
    assert (
        message(log, params, short)
        == "replay: batches_of(0) ended before step 0 of worker 0.\nFix: pass the data of the run."
    )
    damaged = Log(log.header)
    for event in log:
        damaged.append(event._replace(version=event.version + (event.kind == "push")))
    first = next(index for index, event in enumerate(log) if event.kind == "push")
    recorded = damaged[first].without_times()
    assert (
        message(damaged, params, batches_of)
        == f"replay: event {first} of the log is {recorded}, and the server comes to "
        f"{recorded._replace(version=recorded.version - 1)}.\n"
        "Fix: the log is damaged, or its data or loss is not that of the run."
    )


def test_replay_refuses_bad_arguments(regression, message_of):
    opt = opt_of(regression, optax.sgd(0.1), workers=1)
    run_args = (regression.params, regression.batches_of(1))
    assert (
        message_of(TypeError, opt.replay, [], *run_args)
        == "replay: log must be a parameter_server.Log, got list.\n"
        "Fix: pass result.log, or parameter_server.Log.load(path)."
    )
    assert (
        message_of(
            ValueError, opt.replay, so.parameter_server.simulate(2, num_updates=3).log, *run_args
        )
        == "replay: this is the log of a simulation of time only.\n"
        "Fix: give simulate an optimizer, a loss, parameters and data."
    )


def test_a_log_that_broke_off_is_replayed_as_far_as_it_goes(simulate_really, regression):
    result = simulate_really(optax.sgd(0.05), max_staleness=1, num_updates=10)
    short = simulate_really(optax.sgd(0.05), max_staleness=1, num_updates=6)
    log = Log({**result.log.header, "final": None})
    for event in list(result.log)[: len(short.log)]:
        log.append(event)
    same_bits(
        opt_of(regression, optax.sgd(0.05)).replay(
            log, regression.params, regression.batches_of(3)
        ),
        short.params,
    )


def test_a_log_is_saved_and_loaded(tmp_path):
    result = so.parameter_server.simulate(3, max_staleness=1, num_updates=20)
    path = tmp_path / "log.jsonl"
    result.log.save(path)
    loaded = Log.load(path)
    assert loaded == result.log
    assert list(loaded) == list(result.log)
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.jsonl"]
    assert path.stat().st_size / len(loaded) < 70
    loaded.append(Event("leave", 0, 0, 0, 0))
    assert loaded != result.log
    assert repr(result.log) == f"Log({len(result.log)} events, max_staleness=1)"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda lines: [],
            "{path} is no event log of format 1.\nFix: pass a file that Log.save wrote.",
        ),
        (
            lambda lines: lines[1:],
            "{path} is no event log of format 1.\nFix: pass a file that Log.save wrote.",
        ),
        (
            lambda lines: [json.dumps(json.loads(lines[0]) | {"format": 9})],
            "{path} is no event log of format 1.\nFix: pass a file that Log.save wrote.",
        ),
        (lambda lines: lines[:-2], "{path} has 6 events, and its header says 8."),
        (lambda lines: [*lines[:3], '["push",0,'], "line 4 of {path} is no event: '[\"push\",0,'."),
        (
            lambda lines: [*lines[:3], '["fly",0,0,0,0,0,0.0,0.0]'],
            "line 4 of {path} is no event: '[\"fly\",0,0,0,0,0,0.0,0.0]'.",
        ),
        (
            lambda lines: [*lines[:3], '["push",0,0,0,0]'],
            "line 4 of {path} is no event: '[\"push\",0,0,0,0]'.",
        ),
    ],
)
def test_damaged_files_are_refused(damage, message, tmp_path, message_of):
    path = tmp_path / "log.jsonl"
    log = Log({"max_staleness": 0})
    for index in range(8):
        log.append(Event("pull", index, 0, 0, 0))
    log.save(path)
    path.write_text("".join(line + "\n" for line in damage(path.read_text().splitlines())))
    assert message_of(ValueError, Log.load, path) == "parameter_server.Log.load: " + message.format(
        path=path
    )
