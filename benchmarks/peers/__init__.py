"""The same GPT trained by shardopt, by jax by hand, and by other libraries, in turns.

Run by `python -m benchmarks.peers`.
"""
