"""A proof from its trace that a loss is a (weighted) mean over the rows of a batch.

`_walk.relate_jaxprs` walks over two traces of the loss: on the whole batch, and on one piece of it.
It computes a relation between both for each variable. `_relations` defines the relations. `_table`
has the rule of each primitive. `losses/_separable.py` asks for the proof and judges its result.
docs/proof.md explains the idea.
"""
