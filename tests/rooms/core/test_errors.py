"""Messages begin with the function that the user called, which `calling` names."""

import threading

import pytest

from shardopt.core._errors import calling, error_text

pytestmark = pytest.mark.fast


@calling("inner")
def inner():
    return error_text("refused.")


def test_the_innermost_name_counts_and_the_outer_one_returns():
    with calling("outer"):
        assert inner() == "inner: refused."
        assert error_text("refused.", ["a"], "mend a.") == "outer: refused.\n  a\nFix: mend a."
    assert error_text("refused.") == "shardopt: refused."


def test_an_error_restores_the_name():
    @calling("inner")
    def fails():
        raise ValueError(error_text("refused."))

    with calling("outer"):
        with pytest.raises(ValueError, match=r"^inner: refused\.$"):
            fails()
        assert error_text("refused.") == "outer: refused."


def test_a_thread_names_its_caller_itself():
    texts = []
    with calling("outer"):
        thread = threading.Thread(target=lambda: texts.extend([error_text("refused."), inner()]))
        thread.start()
        thread.join()
    assert texts == ["shardopt: refused.", "inner: refused."]


def test_a_decorated_closure_travels_to_another_process():
    cloudpickle = pytest.importorskip("cloudpickle")

    def make(name):
        @calling(name)
        def closure():
            return error_text("refused.")

        return closure

    assert cloudpickle.loads(cloudpickle.dumps(make("sent")))() == "sent: refused."
