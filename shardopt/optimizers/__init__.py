"""Optimizers of matrices that optax lacks, as plain optax transformations: what is a matrix is said by a rule."""

from shardopt.optimizers.matrices import Matrix
from shardopt.optimizers.muon import muon_dimension_numbers
from shardopt.optimizers.shampoo import shampoo
from shardopt.optimizers.soap import soap

__all__ = ["Matrix", "muon_dimension_numbers", "shampoo", "soap"]
