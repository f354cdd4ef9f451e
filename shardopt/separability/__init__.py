"""Whether what a trace computes is a (weighted) mean over the rows of a batch, by proof.

`walk.prove` relates the trace of a loss on the whole batch to its trace on one piece of it, equation by equation. `relations`
says what can be known of a value, `table` which rule each primitive has. The check of a strategy is `engine/separable.py`.
"""
