"""The tiers: what is listed as fast exists, and nothing is fast and slow at once."""

from support.tiers import LONG, PATHS, TESTS, is_fast


def test_what_is_listed_as_fast_exists():
    assert not [path for path in PATHS if not path.exists()]
    assert is_fast(TESTS / "audit" / "test_any.py")
    assert not is_fast(TESTS / "strategies" / "test_contract_exact.py")


def test_what_takes_long_in_a_fast_file_is_there_and_not_fast():
    for path, names in LONG.items():
        assert is_fast(path)
        for name in names:
            assert not is_fast(path, name)
            assert f"def {name.partition('[')[0]}(" in path.read_text()


def test_a_slow_test_is_never_fast(request):
    both = [item for item in request.session.items if {"fast", "slow"} <= {mark.name for mark in item.iter_markers()}]
    assert not both
