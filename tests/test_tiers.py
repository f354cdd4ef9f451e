"""The tiers: what decides from a file's text whether to import it overlooks no fast test."""

from support.tiers import has_fast


def test_a_file_with_fast_tests_is_imported_for_them(request):
    fast = {item.path for item in request.session.items if item.get_closest_marker("fast")}
    assert [path for path in fast if not has_fast(path)] == []
