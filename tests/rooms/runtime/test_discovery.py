"""How many processes can run, as a script says: nothing is made of what is not a number."""

import pytest

from shardopt.runtime._discovery import Discovery


@pytest.mark.parametrize(
    ("script", "count", "why"),
    [
        ("echo 3", 3, []),
        ("echo 0", 0, []),
        ("echo three", None, ["exit code 0, it printed 'three'"]),
        ("echo 3; exit 7", None, ["exit code 7, it printed '3'"]),
        ("echo no such host >&2; exit 1", None, ["exit code 1, it printed 'no such host'"]),
    ],
)
def test_what_a_script_says(script, count, why):
    said = []
    discovery = Discovery(script, say=said.append)
    try:
        assert discovery.ask() == count
        assert discovery.ask() == count
    finally:
        discovery.close()
    # once
    assert said == [
        f"launch: --discovery-script does not say how many processes can run: {one}." for one in why
    ]
