"""The proof on losses of public code: it accepts no loss that mixes rows, and nearly all means."""

import jax
import pytest
from support.loss_corpus import BATCH, CORPUS, PARAMS
from support.piecewise import as_users_have_it, compare, doubled
from support.tiers import tiered

from shardopt.core._types import abstract
from shardopt.losses._separable import Cut, LossCall, find_mixing

MEANS = [name for name, loss in CORPUS.items() if loss.is_mean]
MIXING = [name for name, loss in CORPUS.items() if not loss.is_mean]
FALLS_BACK = {
    "masked_autoencoder": "its weight is a count of tokens, which is the same in each row",
    "ranking_softmax_loss": "it asks whether the mean is NaN",
    "loop_over_rows_by_number": "a turn looks up its row",
}
"""The means on which the proof falls back, and why."""
MOST_FALL_BACK = 0.05
"""The largest share of means on which the proof falls back."""
ROW_EACH = {
    "density_of_a_normal": "jax writes another broadcast for one row",
    "inverse_of_each_row": "jax writes solve in another way for one row",
    "chunked_scan_with_checkpoint": "one row is no chunk of two",
    "solution_of_each_row": "jax writes solve in another way for one row",
}
"""Further means on which the proof falls back if each piece has one row."""
QUICK = {"simclr", "chunked_scan_with_checkpoint", "categorical_q", "vmapped_solution", "kto"}


def accepts(name: str, pieces: int) -> bool:
    loss_fn, _, _, draws = CORPUS[name]
    key = jax.eval_shape(lambda: jax.random.key(0)) if draws else None
    with as_users_have_it():
        params, batch = abstract(doubled((PARAMS, BATCH)))
        return find_mixing(loss_fn, params, batch, Cut(pieces), LossCall(key=key)) is None


@pytest.mark.parametrize("name", MIXING)
def test_a_loss_that_mixes_rows_is_not_accepted(name):
    assert not accepts(name, 2)


@pytest.mark.parametrize("name", MEANS)
def test_the_proof_falls_back_on_a_mean_only_where_the_table_says_so(name):
    assert accepts(name, 2) == (name not in FALLS_BACK)


@pytest.mark.slow
@pytest.mark.parametrize("name", MEANS)
def test_the_proof_falls_back_on_a_mean_of_one_row_only_where_the_table_says_so(name):
    assert accepts(name, len(BATCH["x"])) == (name not in FALLS_BACK | ROW_EACH)


@pytest.mark.fast
def test_few_means_of_the_corpus_fall_back():
    assert len(MEANS) >= 60
    assert len(FALLS_BACK) <= MOST_FALL_BACK * len(MEANS)


@pytest.mark.parametrize(
    "name",
    tiered([name for name, loss in CORPUS.items() if not loss.draws], lambda name: name in QUICK),
)
def test_plain_jax_says_of_each_loss_whether_it_is_a_mean(name):
    comparison = compare(CORPUS[name].loss_fn, PARAMS, BATCH, 2)
    assert comparison.separable == CORPUS[name].is_mean, comparison
