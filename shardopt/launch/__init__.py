"""Several processes of one job on this machine: started, watched, ended together, started anew."""

from shardopt.launch.attempts import launch

__all__ = ["launch"]
