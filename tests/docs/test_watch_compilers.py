"""`benchmarks/watch_compilers.py` without a compiler: the contents of a folder of versions."""

import json

import pytest
from support.scripts import imported


@pytest.fixture(scope="module")
def watch():
    """The script as a module."""
    with imported("watch_compilers") as script:
        yield script


def write_record(folder, platform, verdicts):
    """Write what compiled_proof.py writes of a platform."""
    (folder / platform).mkdir(parents=True)
    record = {
        "date": "2026-11-29",
        "commit": "1234567",
        "versions": {},
        "results": {platform: {"verdicts": verdicts, "not_proved": []}},
    }
    (folder / f"{platform}.json").write_text(json.dumps(record))


@pytest.fixture
def results(watch, tmp_path):
    """Verdicts of three versions; the last one ended its process in a row."""
    write_record(tmp_path / "libtpu==0.0.50.1", "v5p", {"ddp: step": "proved"})
    write_record(tmp_path / "libtpu==0.0.9", "v5p", {"ddp: step": "wrong", "gpt: step": "agrees"})
    write_record(tmp_path / "jax==0.10.2_jaxlib==0.10.2", "cpu", {"ddp: step": "proved"})
    write_record(tmp_path / "jax-cuda12-plugin[with-cuda]==0.10.2", "h100", {"ddp: step": "proved"})
    error = {"row": "gpt", "message": "It ended the process."}
    (tmp_path / "libtpu==0.0.50.1" / "v5p" / "gpt.error").write_text(json.dumps(error))
    return watch.records(tmp_path)


def test_the_table_has_a_column_for_each_version_and_tells_refused_from_not_tried(watch, results):
    programs, compilers, table = watch.table_of(results)
    assert compilers == [
        "cpu jax 0.10.2",
        "h100 jax-cuda12-plugin 0.10.2",
        "v5p libtpu 0.0.9",
        "v5p libtpu 0.0.50.1",
    ]
    assert dict(zip(programs, table, strict=True)) == {
        "ddp: step": ["proved", "proved", "wrong", "proved"],
        "gpt: step": ["", "", "agrees", "refused"],
    }


def test_a_row_that_the_compiler_refused_is_not_compiled_again(tmp_path, monkeypatch):
    with imported("compiled_corpus") as corpus:
        row = corpus.pattern_row()
        attempts = []

        def refuse(row, platform):
            attempts.append(row.name)
            raise RuntimeError("no such instruction")

        monkeypatch.setattr(corpus, "compiled_programs", refuse)
        for _ in range(2):
            assert not list(corpus.programs("cpu", row.name, tmp_path))
    assert attempts == [row.name]
    (error,) = (tmp_path / "cpu").glob("*.error")
    message = "RuntimeError: no such instruction"
    assert json.loads(error.read_text()) == {"row": row.name, "message": message}
