"""The tiers: what decides from a file's text whether to import it overlooks no test."""

from pathlib import Path

from support.tiers import has_fast, is_slow


def test_a_file_with_fast_tests_is_imported_for_them(request):
    fast = {item.path for item in request.session.items if item.get_closest_marker("fast")}
    assert [path for path in fast if not has_fast(path)] == []


def test_a_file_is_left_out_by_default_only_if_its_own_mark_makes_all_tests_slow(tmp_path):
    texts = {
        "pytestmark = pytest.mark.slow\n": True,
        "pytestmark = [\n    pytest.mark.slow,\n    pytest.mark.skipif(True)]\n": True,
        "pytestmark = pytest.mark.fast\n\n@pytest.mark.slow\ndef test_a(): pass\n": False,
        "SLOW = pytest.mark.slow\n": False,
    }
    path = tmp_path / "test_texts.py"
    for text, expected in texts.items():
        path.write_text(text)
        assert is_slow(path) == expected
    slow_files = list(filter(is_slow, Path(__file__).parent.rglob("test_*.py")))
    assert len(slow_files) > 20  # so that it is worth it
