"""Small things about the cluster: its nodes, and actors on them."""

from __future__ import annotations

import functools
import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import ray
from ray import _raylet
from ray._private import ray_logging, services, worker
from ray._private import utils as ray_utils
from ray._private.state import available_resources_per_node, state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.protocol.rpc import Remote, last_line
from health.oom_kills import RAY_MONITOR

log = logging.getLogger(__name__)

NAMESPACE = "elastic"
"""Where the names of all our actors are, whatever the namespace of the driver's job is."""

_GCS_TIMEOUT_S = 30.0

_ANSWER_S = 2.0
"""For a connection to a cluster's head."""

_PRINTING = "ray_print_logs"
"""Ray's name of what prints in a driver what other processes write."""
_WORKERS = "RayTrainWorker"
"""Ray's name of a run's workers there: that of their class."""

_Args = ParamSpec("_Args")
_Actor = TypeVar("_Actor")
_Answer = TypeVar("_Answer")


def connect() -> None:
    """Joins the cluster, or starts one here, unless this process has done so.

    One that starts here has no memory monitor, unless the user's environment says otherwise: where
    memory runs out, Ray's ends what restarts first, which is the coordinator, the supervisor and
    the uploaders, then the newest process, and the worker at fault last. The kernel's takes the
    largest, but in a pod perhaps all, so there Ray's stays. Other clusters need the same where they
    start (docs/clusters.md)."""
    if not ray.is_initialized():
        warn_of_silence()
        if would_start_one() and "KUBERNETES_SERVICE_HOST" not in os.environ:
            os.environ.setdefault(RAY_MONITOR, "0")
        ray.init()
        leave_out_workers(ray_logging.global_worker_stdstream_dispatcher)


def leave_out_workers(streams: Any) -> None:
    """Has Ray print here no more of what workers write: hundreds of them say the same, a traceback
    as often as they raise it, and `elastic logs` shows it with their slots. What the supervisor,
    the coordinator and the autoscaler say has no other way to who waits here, and stays.

    Args:
        streams: Ray's dispatcher of what other processes write.
    """
    printing = [show for name, show in streams.handlers if name == _PRINTING]
    streams.remove_handler(_PRINTING)
    for show in printing:
        streams.add_handler(_PRINTING, functools.partial(_show_others, show))


def _show_others(show: Callable[[dict[str, Any]], None], lines: dict[str, Any]) -> None:
    if lines.get("actor_name") != _WORKERS:
        show(lines)


def warn_of_silence() -> None:
    """Says which cluster Ray is about to wait for, for minutes, where nobody answers at the address
    that the last one on this machine has left. It may be starting anew, so nothing is refused."""
    there: Any = ray_utils
    address = None if os.environ.get("RAY_ADDRESS") else there.read_ray_address()
    if address is None:
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError) as error:
        log.warning(
            "waiting for the Ray cluster at %s, which does not answer (%s). Its address is in "
            "%s: if it has ended, remove that file, or name another one by RAY_ADDRESS",
            address,
            error,
            there.get_ray_address_file(None),
        )


def would_start_one() -> bool:
    """Whether `connect` finds no cluster to join."""
    there: Any = services
    return not ray.is_initialized() and there.canonicalize_bootstrap_address(None) is None


def has_started_one() -> bool:
    """Whether this process has started the cluster that it is in: they end together."""
    node: Any = worker._global_node
    return node is not None and bool(node.is_head())


def start_actor(
    cls: Callable[_Args, _Actor],
    *,
    node: str | None = None,
    max_concurrency: int,
    restarts: bool = False,
    name: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> Callable[_Args, Remote[_Actor]]:
    """An actor that takes no CPU slot, on `node` (Ray's id) or on this process's own.

    Args:
        cls: the actor's class.
        node: where it lives. It never moves, unless it has a name and the node is lost.
        max_concurrency: calls that may be pending in it.
        restarts: whether it is started anew when its process dies.
        name: unique on the cluster. Such an actor outlives its maker: it ends by `end_actors`.
        variables: of its environment, beside its maker's.

    Returns:
        What starts it; it takes what the class takes.
    """
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": max_concurrency}
    if restarts:
        options["max_restarts"] = -1
    if name is not None:
        options |= detached(name)
    if variables:
        options["runtime_env"] = {"env_vars": dict(variables)}
    node = node or ray.get_runtime_context().get_node_id()
    options |= {"scheduling_strategy": on_node(node)} if name is None else _rather_on(node)

    def start(*args: _Args.args, **kwargs: _Args.kwargs) -> Remote[_Actor]:
        return Remote(actor_class(cls).options(**options).remote(*args, **kwargs))

    return start


@functools.cache
def actor_class(cls: Callable[..., Any]) -> Any:
    """Ray's actor class of `cls`: one for all its actors. Whoever starts the first waits for Ray's
    head, which is told of the class and keeps it for as long as the job lasts."""
    return ray.remote(cls)


def export_actors(*classes: Callable[..., Any]) -> None:
    """Tells Ray's head of actor classes, as the first `start_actor` of each does otherwise. From
    then on none waits for the head, but those with names."""
    here: Any = worker.global_worker
    for cls in classes:
        ours = actor_class(cls).__ray_metadata__
        if ours.last_export_cluster_and_job != here.current_cluster_and_job:
            here.function_actor_manager.export_actor_class(
                ours.modified_class,
                ours.actor_creation_function_descriptor,
                ours.method_meta.methods.keys(),
            )
            ours.last_export_cluster_and_job = here.current_cluster_and_job


def detached(name: str) -> dict[str, Any]:
    """Options of an actor that outlives its maker, under `name`."""
    return {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}


def find_actor(name: str) -> Any | None:
    """Ray's handle of a named actor; None where there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def named_actors(prefix: str) -> list[str]:
    """Names of the named actors that begin with `prefix`."""
    rows = ray.util.list_named_actors(all_namespaces=True)
    named = [row["name"] for row in rows if row["namespace"] == NAMESPACE]
    return [name for name in named if name.startswith(prefix)]


def end_actors(prefix: str) -> None:
    """Ends all named actors whose names begin with `prefix`, for good; but not the one that this
    process is, which may have more to do (`end_own_actor`)."""
    here: Any = worker.global_worker
    for name in named_actors(prefix):
        handle = find_actor(name)
        if handle is not None and handle._actor_id != here.actor_id:
            ray.kill(handle)


def end_own_actor() -> None:
    """Ends the actor that this process is, for good."""
    ray.kill(ray.get_runtime_context().current_actor)


def process_of(actor: Remote[object]) -> tuple[int, bool] | None:
    """The process of an actor, and whether it is on this process's own node; None while it
    starts."""
    row = state.actor_table(actor.handle._actor_id.hex())
    if row.get("State") != "ALIVE":
        return None
    here = row["Address"]["NodeID"] == ray.get_runtime_context().get_node_id()
    return int(row["Pid"]), here


def raylet_of(node: str) -> tuple[str, int] | None:
    """Host and port of the raylet on `node` (Ray's id); None where Ray knows that it is gone."""
    for row in ray.nodes():
        if row["NodeID"] == node and row["Alive"]:
            return row["NodeManagerAddress"], row["NodeManagerPort"]
    return None


def live_nodes() -> list[str]:
    """Ray's ids of the nodes that it believes alive."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


@dataclass(frozen=True, kw_only=True)
class Failed:
    """No answer of a node."""

    why: str
    """In words."""


def on_nodes(
    function: Callable[..., _Answer],
    arguments: Mapping[str, tuple[Any, ...]],
    *,
    gpus: Mapping[str, float] = MappingProxyType({}),
    timeout_s: float,
) -> dict[str, _Answer | Failed]:
    """Calls `function` on nodes, in a process of each.

    Args:
        function: importable there.
        arguments: node (Ray's id) -> what it is called with.
        gpus: node -> GPUs that must be free there, and belong to the call while it lasts.
        timeout_s: bound on all of them together; a call that has not begun by then never does.
    """
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    calls = {
        task.options(scheduling_strategy=on_node(node), num_gpus=gpus.get(node, 0)).remote(
            *given
        ): (node)
        for node, given in arguments.items()
    }
    done, late = ray.wait(list(calls), num_returns=max(1, len(calls)), timeout=timeout_s)
    answers: dict[str, _Answer | Failed] = {}
    for call in done:
        try:
            answers[calls[call]] = ray.get(call)
        except ray.exceptions.RayTaskError as error:
            answers[calls[call]] = Failed(why=last_line(error))
        except ray.exceptions.RayError as error:
            answers[calls[call]] = Failed(why=str(error))
    for call in late:
        ray.cancel(call)
        answers[calls[call]] = Failed(why=f"no answer in {timeout_s:g} s")
    return answers


def on_every_node(function: Callable[..., Any], *args: Any, timeout_s: float) -> dict[str, Any]:
    """Calls `function(*args, node)` on each live node, in a process of that node.

    Returns:
        What each node answered; nodes that failed or took longer than `timeout_s` are left out.
    """
    answers = on_nodes(
        function, {node: (*args, node) for node in live_nodes()}, timeout_s=timeout_s
    )
    for node, answer in answers.items():
        if isinstance(answer, Failed):
            log.warning("%s on node %s: %s", function.__name__, node, answer.why)
    return {node: one for node, one in answers.items() if not isinstance(one, Failed)}


@dataclass(frozen=True, kw_only=True)
class Room:
    """A node that work can be placed on."""

    address: str
    """IP address by which the cluster knows it."""
    gpus: float
    """GPUs that Ray counts there."""


def nodes_with_room() -> dict[str, Room]:
    """The live nodes with any CPU or GPU, by Ray's id: a head without either trains nothing."""
    return {
        node["NodeID"]: Room(
            address=node["NodeManagerAddress"], gpus=node["Resources"].get("GPU", 0.0)
        )
        for node in ray.nodes()
        if node["Alive"] and {"CPU", "GPU"} & node["Resources"].keys()
    }


def is_actor() -> bool:
    """Whether this process is an actor, and not one that only has such an object, as tests do."""
    here: Any = worker.global_worker
    return ray.is_initialized() and not here.actor_id.is_nil()


def see_own_gpus() -> None:
    """Has this process see those GPUs alone that Ray has given it, also where the cluster has Ray
    leave that to others (RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES): a worker computes on the
    first one that it sees. To be called before CUDA starts."""
    given = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    if given:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(given)


def started_anew() -> bool:
    """Whether this actor was started in the place of one whose process died. Ray's own question
    warns on the user's console that it asks in a deprecated way."""
    if not is_actor():
        return False
    here: Any = worker.global_worker
    return bool(state.actor_table(here.actor_id.hex()).get("NumRestarts"))


def on_node(node: str) -> NodeAffinitySchedulingStrategy:
    """The strategy that places an actor on `node` (Ray's id) and nowhere else."""
    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def _rather_on(node: str) -> dict[str, Any]:
    """Options that place an actor on `node`, and elsewhere where that is lost. A soft node affinity
    does not: Ray places an actor that takes no CPU anywhere then."""
    raylet: Any = _raylet
    return {
        "label_selector": {raylet.RAY_NODE_ID_KEY: node},
        "fallback_strategy": [{"label_selector": {}}],
    }


def available_per_node() -> list[dict[str, float]]:
    """The free resources of each live node that is not draining."""
    draining = draining_nodes()
    return [free for node, free in available_resources_per_node().items() if node not in draining]


def accelerator_types() -> list[str]:
    """Ray's names of the kinds of GPU on the cluster, such as H100."""
    names = (name.partition(":") for name in ray.cluster_resources())
    return sorted(kind for prefix, _, kind in names if prefix == "accelerator_type")


def draining_nodes() -> dict[str, int]:
    """Ray's id of every node that Ray drains -> deadline, ms since the epoch; 0: none given."""
    return dict(state.get_draining_nodes())


@dataclass(frozen=True, kw_only=True)
class FoundNode:
    """What Ray knows of a node that is or was there."""

    address: str
    """IP address by which the cluster knows it."""
    instance: str
    """What those who started it call it (`RAY_CLOUD_INSTANCE_ID`): KubeRay its pod, the autoscaler
    its instance; "": they did not say."""
    head: bool
    """Whether Ray's head is there."""


def find_node(node: str) -> FoundNode | None:
    """What Ray knows of `node` (Ray's id); None: nothing."""
    from ray.core.generated import gcs_service_pb2

    messages: Any = gcs_service_pb2
    selector = messages.GetAllNodeInfoRequest.NodeSelector(node_id=bytes.fromhex(node))
    found = _gcs().get_all_node_info(timeout=_GCS_TIMEOUT_S, node_selectors=[selector])
    for info in found.values():
        return FoundNode(
            address=info.node_manager_address, instance=info.instance_id, head=info.is_head_node
        )
    return None


def end_node(node: str) -> None:
    """Has Ray end the raylet of `node`, and all that runs there. The autoscaler's own way. Twice
    does no harm; a node that is gone counts as ended."""
    _gcs().drain_nodes([bytes.fromhex(node)], timeout=_GCS_TIMEOUT_S)


def cluster_address() -> str:
    """The cluster's address, for `ray start`."""
    address: str = ray.get_runtime_context().gcs_address
    return address


def _gcs() -> Any:
    raylet: Any = _raylet
    return raylet.GcsClient(address=cluster_address())


def drain_node(node: str, deadline_s: float | None, reason: str) -> None:
    """Has Ray drain `node`: nothing is placed there any more, and what works there counts as going,
    so that successors are asked for.

    Args:
        node: Ray's id.
        deadline_s: when it will be gone, in seconds since the epoch; None: unknown.
        reason: in words.
    """
    from ray.core.generated import autoscaler_pb2

    messages: Any = autoscaler_pb2
    kind = messages.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why_not = _gcs().drain_node(node, kind, reason, int(1000 * (deadline_s or 0)))
    if not accepted:
        log.warning("Ray does not drain node %s: %s", node, why_not)


def own_address() -> str:
    """The address that the cluster knows this process's machine by."""
    address: str = ray.util.get_node_ip_address()
    return address
