"""Several processes of one job on this machine: started, watched, ended together, started anew."""

from shardopt.runtime.launch import launch

__all__ = ["launch"]
