"""A mapping that is a value and still cheap to change: one with a thousand entries is not copied whole."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")
_BITS = 6


class PersistentMap(Mapping[int, Value]):
    """A mapping from integers that never changes; `put` and `drop` return another that shares most of it.

    Keys that agree but for their last six bits share a bucket. A change copies one bucket and the table of buckets:
    for n keys about n / 64 + 64 references, where a dict would copy n.

    Example:
      >>> one = PersistentMap().put(3, "a")
      >>> two = one.put(70, "b").drop(3)
      >>> dict(one), dict(two), len(two)
      ({3: 'a'}, {70: 'b'}, 1)
    """

    __slots__ = ("_buckets", "_size")

    def __init__(self, _buckets: dict[int, dict[int, Any]] | None = None, _size: int = 0):
        self._buckets, self._size = _buckets or {}, _size

    def __getitem__(self, key: int) -> Value:
        return self._buckets[key >> _BITS][key]

    def __contains__(self, key: Any) -> bool:
        return key in self._buckets.get(key >> _BITS, ())

    def __iter__(self) -> Iterator[int]:
        return (key for bucket in self._buckets.values() for key in bucket)

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"PersistentMap({dict(self)})"

    def put(self, key: int, value: Value) -> "PersistentMap[Value]":
        """Return the mapping with this entry."""
        old = self._buckets.get(key >> _BITS, {})
        bucket, buckets = old.copy(), self._buckets.copy()
        bucket[key] = value
        buckets[key >> _BITS] = bucket
        return PersistentMap(buckets, self._size + (key not in old))

    def drop(self, key: int) -> "PersistentMap[Value]":
        """Return the mapping without this key, whether it has it or not."""
        if key not in self:
            return self
        bucket, buckets = self._buckets[key >> _BITS].copy(), self._buckets.copy()
        del bucket[key]
        if bucket:
            buckets[key >> _BITS] = bucket
        else:
            del buckets[key >> _BITS]
        return PersistentMap(buckets, self._size - 1)
