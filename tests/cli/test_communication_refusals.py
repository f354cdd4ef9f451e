"""What the command line refuses of replicas and reducers, before anything compiles."""

import jax
import pytest

from shardopt.cli import main

GRADIENTS = "Fix: choose --strategy ddp, or hybrid with --placement ddp or zero1; or compress outer gradients instead: --sync-every."


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--outer sgd --delay 1",
            "train: 2 options for local updates, and no --sync-every.\n  --outer sgd\n  --delay 1\n"
            "Fix: leave out what is listed, or give the steps between synchronizations: --sync-every 50.",
        ),
        (
            "--replicas 2 --sync-every 4 --outer average --outer-lr 0.5 --reducer int8",
            "train: 2 options for an outer optimizer; --outer average has none.\n  --outer-lr 0.5\n  --reducer int8\n"
            "Fix: leave out what is listed, or choose --outer sgd, which averages by default too.",
        ),
        (
            "--replicas 2 --sync-every 4 --warmup-sync-steps 3",
            "train: --warmup-sync-steps is for --outer average.\nFix: leave it out, or choose --outer average.",
        ),
        (
            "--sync-every 4",
            "train: --sync-every 4 is for several replicas, and there is one.\n"
            "Fix: add --replicas 2, or leave --sync-every out.",
        ),
        ("--replicas 2 --sync-every 0", "train: --sync-every must be at least 1, got 0."),
        ("--replicas 2 --sync-every 4 --delay -1", "train: --delay must be at least 0, got -1."),
        ("--replicas 2 --sync-every 4 --outer-lr 0", "train: --outer-lr must be above 0, got 0.0."),
        (
            "--replicas 2 --sync-every 4 --outer-momentum 1",
            "train: --outer-momentum must be at least 0 and below 1, got 1.0.",
        ),
        (
            "--replicas 2 --sync-every 4 --fragments 3",
            "diloco: sync_every=4 is not divisible by fragments=3, remainder 1.\nFix: use sync_every=3 or 6.",
        ),
        (
            "--replicas 2 --sync-every 4 --fragments 2 --delay 2",
            "diloco: delay=2 must be below sync_every / fragments = 2: the next fragment is sent then.\n"
            "Fix: use a delay of at most 1, or sync less often.",
        ),
        ("--replicas 2 --sync-every 4 --mix 2", "diloco: mix must be between 0 and 1, got 2.0."),
        (
            "--replicas 3",
            "train: 8 devices cannot be shared evenly by --replicas 3.\n"
            "Fix: choose another number of either, or name sizes with --mesh.",
        ),
        (
            "--replicas 2 --mesh replica=4,data=2",
            "train: --mesh replica=4,data=2 and --replicas 2 disagree.\nFix: leave one of them out.",
        ),
        (
            "--reducer sign",
            f"train: --reducer takes the mean of replicated gradients, and fsdp shards them or what they update.\n{GRADIENTS}",
        ),
        (
            "--reducer sign --strategy hybrid --placement zero2",
            "train: --reducer takes the mean of replicated gradients, and hybrid with --placement zero2 shards them or what "
            f"they update.\n{GRADIENTS}",
        ),
        (
            "--strategy ddp --no-error-feedback",
            "train: --no-error-feedback is for a reducer, and there is none.\n"
            "Fix: leave it out, or choose one with --reducer.",
        ),
        (
            "--strategy ddp --reducer bf16 --no-error-feedback",
            "train: --no-error-feedback has no meaning for bf16, which rounds and feeds nothing back.\nFix: leave it out.",
        ),
        (
            "--strategy ddp --reducer-warmup-steps 3",
            "train: --reducer-warmup-steps is for a reducer, and there is none.\n"
            "Fix: leave it out, or choose one with --reducer.",
        ),
        (
            "--strategy ddp --reducer sign --reducer-warmup-steps -1",
            "train: --reducer-warmup-steps must be at least 0, got -1.",
        ),
        (
            "--strategy ddp --reducer int4",
            "train: there is no reducer 'int4'.\nFix: choose bf16, int8, sign, top_k or power_sgd.",
        ),
        (
            "--strategy ddp --reducer top_k(0.1)",
            "train: --reducer top_k(0.1) cannot be read.\n"
            "Fix: write a name such as int8, or a call with keywords, such as 'top_k(density=0.05)'.",
        ),
        (
            "--strategy ddp --reducer top_k(rank=4)",
            "train: --reducer top_k has no argument 'rank'.\nFix: it takes density, momentum.",
        ),
        (
            "--strategy ddp --reducer top_k(density=2)",
            "top_k: density must be above 0 and at most 1, got 2.\n"
            "Fix: use 1 to send everything, 0.01 to send one entry in a hundred.",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_compiles(tiny, tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.setattr(jax._src.compiler, "compile_or_get_cached", lambda *_, **__: pytest.fail("compiled"))
    folder = tmp_path / "run"
    assert main([*tiny, "--run-dir", str(folder), *words.split()]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not folder.exists()
