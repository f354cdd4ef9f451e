"""Optimizers for matrices that optax does not have, as plain optax transformations.

Rules select the leaves that are matrices, and the dims that are rows and columns.
"""

from shardopt.optimizers._decay_mask import decay_mask
from shardopt.optimizers._matrices import Matrix
from shardopt.optimizers._muon import muon_dimension_numbers
from shardopt.optimizers._soap import soap

__all__ = ["Matrix", "decay_mask", "muon_dimension_numbers", "soap"]
