"""Whether what a trace computes is a (weighted) mean over the rows of a batch: rows are followed through its equations.

`analysis.follow` walks a loss traced on several sizes of a batch; `rules` says what each primitive does to the `values`
that are known: rows, sums over rows, numbers that know nothing of rows. The check of a strategy is `engine/separable.py`.
"""
