"""Pack documents of any length into rows of one length.

Segment ids and positions keep the documents separate.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import ArrayLike

from shardopt.core import calling, check_count, format_error
from shardopt.core._extras import require
from shardopt.data._corpus import Batch, Corpus, Documents

if TYPE_CHECKING:
    import grain


@calling("data.pack")
def pack(
    documents: "Corpus | Iterable[ArrayLike | Mapping[str, ArrayLike]] | grain.MapDataset | grain.IterDataset",
    length: int,
    *,
    open_rows: int = 64,
) -> "grain.IterDataset":
    """Pack documents into rows of `length` positions.

    A document goes into the first open row with room (first fit).

    Args:
      documents: 1-D arrays of integers: a sequence of them; a `Corpus`, whose files are the
        documents; a grain dataset, to shuffle and repeat them
        (`grain.MapDataset.source(documents).shuffle(seed=0).repeat()`). Any other iterable is read
        into memory at once. A document can be a dict with "tokens" and "weights", one of each for
        every token, as `read_tokens` returns: a token is a target with its weight.
      length: T, the number of positions in a row.
      open_rows: the number of rows that are filled at the same time. More rows leave less padding,
        and mix documents that are further apart.

    Returns:
      A grain dataset of rows, the same every time; its method `.batch(B)` makes batches [B, T]. Its
      iterators have `get_state()` and `set_state(state)`; the state is JSON, and rows continue from
      it without a break.

    Raises:
      ModuleNotFoundError: if grain is not installed.
      TypeError: if `length` or `open_rows` is not an integer. Later, while rows are read, if a
        document does not hold integers, or its weights are not real numbers.
      ValueError: if `length` or `open_rows` is below 1. Later, if a document is not 1-D, or has a
        token that is negative or beyond int32. If it has another number of weights than of tokens,
        or a weight that is negative, infinite in float32 or NaN. If it has other keys.

    Example:
      >>> row = next(iter(pack([[5, 6, 7], [8, 9]], 6)))
      >>> row["tokens"].tolist(), row["targets"].tolist(), row["segment_ids"].tolist()
      ([5, 6, 7, 8, 9, 0], [6, 7, 0, 9, 0, 0], [1, 1, 1, 2, 2, 0])
      >>> row["positions"].tolist(), row["weights"].tolist()
      ([0, 1, 2, 0, 1, 0], [1.0, 1.0, 0.0, 1.0, 0.0, 0.0])

    A row is a dict of arrays [length]:

    - "tokens", int32: every token of every document is in one row once, in order; 0 on padding.
    - "targets", int32: the next token of the same document; 0 if there is none.
    - "weights", float32: 1 where there is a target; 0 on the last token of a document and on
      padding. If a document has weights, the weight of the target.
    - "segment_ids", int32: 1, 2, ... for the documents of the row, in order; 0 on padding.
    - "positions", int32: 0, 1, ... within each segment; 0 on padding.

    A document longer than `length` is cut into pieces of `length` tokens and a last, shorter piece.
    Each piece is a segment. The last target of a piece is the first token of the next piece. So a
    document of n tokens has n - 1 targets, however it is cut. Empty documents are skipped.

    **Equivalence**: the rows have the same pairs of token and target as the separate documents.
    Attention within segments computes the same for each document, up to summation order. In a
    document that is cut, each piece only sees itself.

    **Padding**: `open_rows` rows are filled at a time. If a document fits into none of them, all of
    them are returned, in order, and new rows are opened. Any two rows that were filled together
    hold more than `length` tokens, so less than half of their positions are padding, except in one
    row. With the files of Python's library, padding is 1 percent at 1,024 positions and 3 percent
    at 8,192. It is the share of zeros in "segment_ids".

    References:
      Johnson, Demers, Ullman, Garey and Graham, "Worst-Case Performance Bounds for Simple
      One-Dimensional Packing Algorithms", 1974; Krell, Kosec, Perez and Fitzgibbon, "Efficient
      Sequence Packing without Cross-contamination", 2021;
      grain.experimental.FirstFitPackIterDataset.
    """
    require("grain", extra="data")
    import grain
    from grain import experimental

    check_count("length", length)
    check_count("open_rows", open_rows)

    class DocumentCutter(experimental.FlatMapTransform):
        def flat_map(self, element: ArrayLike | Mapping[str, ArrayLike]) -> list[Batch]:
            return _cut_document(element, length)

    source = Documents(documents) if isinstance(documents, Corpus) else documents
    dataset: Any = source
    if not isinstance(source, grain.MapDataset | grain.IterDataset):
        is_sequence = hasattr(source, "__getitem__") and hasattr(source, "__len__")
        dataset = grain.MapDataset.source(cast("Any", source) if is_sequence else list(source))
    if isinstance(dataset, grain.MapDataset):
        # No reader threads: rows are packed on the thread that asks for them, while devices
        # compute.
        dataset = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    return experimental.FirstFitPackIterDataset(
        experimental.FlatMapIterDataset(dataset, DocumentCutter()),
        length_struct={"tokens": length, "targets": length, "weights": length},
        padding_struct={"tokens": 0, "targets": 0, "weights": 0.0},
        meta_features=("targets", "weights"),
        num_packing_bins=open_rows,
        shuffle_bins=False,
    ).map(_row)


def _cut_document(document: ArrayLike | Mapping[str, ArrayLike], length: int) -> list[Batch]:
    """Cut a document into pieces of at most `length` tokens, each with its targets and their
    weights.
    """
    if not isinstance(document, Mapping):
        document = {"tokens": document, "weights": np.ones(np.shape(document))}
    if set(document) != {"tokens", "weights"}:
        problem = f'a document has "tokens" and "weights" alone; got {sorted(document)}.'
        raise ValueError(format_error("data.pack", problem, fix="give 0 to tokens without a loss."))
    tokens = np.asarray(document["tokens"])
    weights = np.asarray(document["weights"])
    if not tokens.size:
        return []
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"data.pack: a document must hold integer token ids, got {tokens.dtype}.")
    if tokens.ndim != 1 or tokens.min() < 0:
        received = f"shape {tokens.shape}" if tokens.ndim != 1 else f"token {tokens.min()}"
        raise ValueError(
            f"data.pack: a document must be 1-D, of token ids from 0 on; got {received}."
        )
    if tokens.max() > np.iinfo(np.int32).max:
        raise ValueError(f"data.pack: a token must fit into int32; got {tokens.max()}.")
    if weights.shape != tokens.shape:
        problem = (
            f"a document has tokens of shape {tokens.shape} and weights of shape {weights.shape}."
        )
        raise ValueError(format_error("data.pack", problem, fix="give one weight for each token."))
    if weights.dtype.kind not in "biuf":
        raise TypeError(f"data.pack: weights must be real numbers, got {weights.dtype}.")
    if not ((weights >= 0) & (weights <= np.finfo(np.float32).max)).all():
        problem = "a document has weights that are negative, infinite or NaN."
        raise ValueError(format_error("data.pack", problem, fix="give 0 to tokens without a loss."))
    whole = {
        "tokens": tokens.astype(np.int32),
        "targets": np.append(tokens[1:], 0).astype(np.int32),
        "weights": np.append(weights[1:], 0).astype(np.float32),
    }
    return [
        {name: values[i : i + length] for name, values in whole.items()}
        for i in range(0, len(tokens), length)
    ]


def _row(packed: Batch) -> Batch:
    return {name.removeprefix("tokens_"): values for name, values in packed.items()}
