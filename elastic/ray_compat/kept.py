"""Values that outlive the process that made them: in Ray's own key-value store, on its head node.

The arguments of an actor lie with whoever made it. One that is to be started anew after its maker
is gone takes what it needs from here.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from ray import _raylet, cloudpickle
from ray._private import worker

from elastic.ray_compat.cluster import NAMESPACE

_SPACE = NAMESPACE.encode()

_Value = TypeVar("_Value")


class Kept(Generic[_Value]):
    """A value under a key. Crosses Ray as its key alone.

    Args:
        key: unique on the cluster.
    """

    def __init__(self, key: str) -> None:
        self.key = key

    @classmethod
    def keep(cls, key: str, value: _Value) -> Kept[_Value]:
        """Puts `value` there, until `forget`."""
        _store().internal_kv_put(key.encode(), cloudpickle.dumps(value), True, _SPACE)
        return cls(key)

    @property
    def value(self) -> _Value:
        """What was put there.

        Raises:
            KeyError: it was forgotten.
        """
        data = _store().internal_kv_get(self.key.encode(), _SPACE)
        if data is None:
            raise KeyError(self.key)
        value: _Value = cloudpickle.loads(data)
        return value


def most_kept_bytes() -> int:
    """How large a value may be, pickled: it goes there in one message. Ray's own bound, 512 MiB
    unless `RAY_max_grpc_message_size` says otherwise."""
    ray: Any = _raylet
    most: int = ray.Config.max_grpc_message_size()
    return most


def keep_stop(prefix: str, reason: str) -> None:
    """Leaves word that a run is to stop, for a coordinator that can take no call now: its driver
    may be gone by then. `forget` takes it back, with the rest of the run.

    Args:
        prefix: of the names of this start of the run; the next one is not to stop.
        reason: by what.
    """
    Kept.keep(f"{prefix}stop", reason)


def kept_stop(prefix: str) -> str | None:
    """The reason that was left by `keep_stop`; None where there is none."""
    try:
        return Kept[str](f"{prefix}stop").value
    except KeyError:
        return None


def forget(prefix: str) -> None:
    """Deletes all that lies under keys that begin with `prefix`."""
    _store().internal_kv_del(prefix.encode(), True, _SPACE)


def _store() -> Any:
    """Of the cluster that this process is in now: `ray.experimental.internal_kv` has none after a
    second `ray.init`."""
    here: Any = worker.global_worker
    return here.gcs_client
