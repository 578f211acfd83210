"""Read graphs from files: our own JSON, a saved profile, and three public formats.

- dnn-partitioning (Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph
  Operators", NeurIPS 2020): JSON with ``fpgaLatency`` and ``colorClass`` per node.
- PipeDream (Narayanan et al., SOSP 2019): text, ``node1 -- Conv2d() -- forward_compute_time=..``.
- Piper (Tarnawski et al., NeurIPS 2021): JSON with ``TMPCs`` per node.

Times stay in the unit of the file, which ``graph.graph["unit"]`` names.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Container, Hashable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelane.errors import ConfigError, PartitionError
from pipelane.files import json_object, read_text
from pipelane.graph import Tensor, build_graph, graph_from_json

if TYPE_CHECKING:
    import networkx

    from pipelane.profile import Profile

__all__ = ["read_dnn_partitioning", "read_graph", "read_pipedream", "read_piper"]

#: Bytes per second with which PipeDream's profiles are priced.
PIPEDREAM_BANDWIDTH = 12e9


def read_graph(path: str | Path) -> networkx.DiGraph | Profile:
    """Read a graph or a profile; the format is recognised by what is in the file.

    Raises:
        ConfigError: the file cannot be read or has none of the formats; names file and line or
            entry, and what was expected.
        PartitionError: it was read and is no valid graph.
    """
    path = Path(path)
    text, where = read_text(path), str(path)
    if not text.lstrip().startswith("{"):
        return read_pipedream(text, where)
    data = json_object(text, where)
    kind = data.get("kind")
    if kind == "pipelane.profile":
        from pipelane.profile import Profile  # which needs torch

        return Profile.from_json(text, where)
    if kind == "pipelane.graph":
        return graph_from_json(text, where)
    nodes = data.get("nodes")
    first = nodes[0] if isinstance(nodes, list) and nodes else None
    if isinstance(first, dict) and "fpgaLatency" in first:
        return read_dnn_partitioning(text, where)
    if isinstance(first, dict) and "TMPCs" in first:
        return read_piper(text, where)
    raise ConfigError(
        f"{where}: this JSON is none of the known formats; expected kind 'pipelane.graph' or "
        "'pipelane.profile', or nodes with 'fpgaLatency' (dnn-partitioning) or 'TMPCs' (Piper)"
    )


def read_dnn_partitioning(text: str, where: str = "graph") -> networkx.DiGraph:
    """A graph of the dnn-partitioning collection, times in ms.

    A forward node and the backward nodes of the same ``colorClass`` are one colocation group. The
    time of a node is its ``fpgaLatency``. What leaves its stage costs ``cost``. Forward edges
    order the stages, and backward edges do so the other way round, unless the file writes them in
    the direction of the forward edges, as those made from layer graphs do.

    Args:
        text: the file.
        where: what to call it in messages.
    """
    data = json_object(text, where)
    found: dict[Hashable, dict[str, Any]] = {}
    backward: set[Hashable] = set()
    groups: dict[Hashable, list[Hashable]] = {}
    for place, node, name, entry in _each_node(data, where):
        seconds = _number(entry, "fpgaLatency", place)
        is_backward = bool(entry.get("isBackwardNode"))
        found[node] = {
            "forward": 0.0 if is_backward else seconds,
            "backward": seconds if is_backward else 0.0,
            "static_bytes": _number(entry, "size", place, 0.0),
        }
        found[node] |= name
        if is_backward:
            backward.add(node)
        if entry.get("colorClass") is not None:
            groups.setdefault(entry["colorClass"], []).append(node)
    color = {node: c for c, nodes in groups.items() for node in nodes}
    outputs = _outputs(data, where, found, "cost")
    forward = {
        (color.get(a, a), color.get(b, b))
        for a, targets in outputs.items()
        for b in targets
        if a not in backward and b not in backward
    }
    along = against = 0
    for a, targets in outputs.items():
        for b in targets:
            if a in backward and b in backward:
                pair = (color.get(a, a), color.get(b, b))
                along += pair in forward
                against += pair[::-1] in forward
    order = []
    tensors = []
    for source, targets in outputs.items():
        both = source in backward
        ordering = [to for to in targets if (to in backward) == both]
        if not both or along > against:
            order += [(source, to) for to in ordering]
        else:
            order += [(to, source) for to in ordering]
        # One output; should the file give its edges several costs, each cost is a part of it.
        for cost in sorted(set(targets.values())):
            consumers = tuple(to for to in targets if targets[to] == cost)
            if cost:
                tensors.append(Tensor(source, consumers, seconds=cost, orders=False))
    return build_graph(found, tensors, order=order, colocate=groups.values(), unit="ms")


_NODE = re.compile(r"^(?P<id>\S+) -- (?P<kind>.*) -- (?P<values>[^-].*=.*)$")
_EDGE = re.compile(r"^\s+(?P<source>\S+) -- (?P<target>\S+)\s*$")
_VALUE = re.compile(r"(\w+)=(\[[^\]]*\]|[^,\s]+)")


def read_pipedream(text: str, where: str = "graph") -> networkx.DiGraph:
    """A profile as PipeDream writes it, times in ms.

    Nodes whose description starts with ``Input`` are dropped. A node's output has
    ``activation_size`` bytes (a list is added up) and is priced at 12e9 bytes/s each way.

    Args:
        text: the file.
        where: what to call it in messages.
    """
    found: dict[Hashable, dict[str, Any]] = {}
    sizes: dict[Hashable, float] = {}
    dropped: set[Hashable] = set()
    consumers: dict[Hashable, list[Hashable]] = {}
    ends: list[tuple[int, Hashable]] = []
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{where}, line {number}"
        if not line.strip():
            continue
        if edge := _EDGE.match(line):
            consumers.setdefault(edge["source"], []).append(edge["target"])
            ends += [(number, edge["source"]), (number, edge["target"])]
            continue
        entry = _NODE.match(line)
        if entry is None:
            raise ConfigError(
                f"{place}: expected 'node1 -- Description -- forward_compute_time=1.5, "
                "backward_compute_time=2.5, activation_size=4096, parameter_size=1024' or, behind "
                f"a tab, 'node1 -- node2'; got {line[:80]!r}"
            )
        node = entry["id"]
        if node in found or node in dropped:
            raise ConfigError(f"{place}: a second node {node!r}")
        if entry["kind"].startswith("Input"):
            dropped.add(node)
            continue
        values = dict(_VALUE.findall(entry["values"]))
        sizes[node] = _sizes(values, "activation_size", place)
        found[node] = {
            "forward": _sizes(values, "forward_compute_time", place),
            "backward": _sizes(values, "backward_compute_time", place),
            "parameter_bytes": _sizes(values, "parameter_size", place),
            "activation_bytes": sizes[node],
        }
    if not found:
        raise ConfigError(f"{where}: no node found; expected lines 'node1 -- Description -- ...'")
    for number, end in ends:
        if end not in found and end not in dropped:
            raise PartitionError(f"{where}, line {number}: there is no node {end!r}")
    tensors = [
        Tensor(
            source,
            tuple(targets),
            bytes=sizes[source],
            seconds=2e3 * sizes[source] / PIPEDREAM_BANDWIDTH,
        )
        for source, targets in consumers.items()
        if source in found
    ]
    return build_graph(found, tensors, unit="ms")


def _sizes(values: Mapping[str, str], key: str, place: str) -> float:
    """A number, or the sum of a list ``[a; b; c]``."""
    if key not in values:
        raise ConfigError(f"{place}: {key} is missing")
    try:
        total = sum(float(part) for part in values[key].strip("[]").split(";") if part.strip())
    except ValueError:
        total = math.nan
    return _checked(total, values[key], f"{place}: {key}")


def read_piper(text: str, where: str = "graph") -> networkx.DiGraph:
    """A graph of the Piper collection: degree 1, variant ``vanilla``; seconds per sample.

    ``memoryUsageA`` is what a stage holds per micro-batch, ``memoryUsageB`` what it holds anyway.

    Args:
        text: the file.
        where: what to call it in messages.
    """
    data = json_object(text, where)
    bandwidth = _number(data, "bandwidth", where, math.inf)
    found: dict[Hashable, dict[str, Any]] = {}
    for place, node, name, entry in _each_node(data, where):
        variants = entry.get("TMPCs", {}).get("1", [])
        plain = next((v for v in variants if v.get("id") == "vanilla"), None)
        if plain is None:
            raise ConfigError(f"{place}: no variant 'vanilla' of degree 1 under 'TMPCs'")
        found[node] = {
            "seconds": _number(plain, "timePerSample", place),
            "parameter_bytes": _number(plain, "parameterSize", place, 0.0),
            "static_bytes": _number(plain, "memoryUsageB", place),
            "activation_bytes": _number(plain, "memoryUsageA", place),
        }
        found[node] |= name
    outputs = _outputs(data, where, found, "communicationCost")
    tensors = [
        Tensor(
            source,
            tuple(to for to in targets if targets[to] == size),
            bytes=size,
            seconds=2 * size / bandwidth,
        )
        for source, targets in outputs.items()
        for size in sorted(set(targets.values()))
    ]
    return build_graph(found, tensors)


def _each_node(
    data: Mapping[str, Any], where: str
) -> Iterator[tuple[str, Hashable, dict[str, str], dict[str, Any]]]:
    """Of each node its place in the file, its id, its name if no other has the same, and itself."""
    entries = _list(data, "nodes", where)
    names = Counter(entry.get("name") for entry in entries)
    seen: set[Hashable] = set()
    for number, entry in enumerate(entries):
        place = f"{where}, node {number}"
        node = _key(entry, "id", place)
        if node in seen:
            raise ConfigError(f"{place}: a second node with id {node!r}")
        seen.add(node)
        own = "name" in entry and names[entry["name"]] == 1
        yield place, node, {"name": entry["name"]} if own else {}, entry


def _outputs(
    data: Mapping[str, Any], where: str, nodes: Container[Hashable], key: str
) -> dict[Hashable, dict[Hashable, float]]:
    """Node -> those that take its output -> what the edge says about it under ``key``."""
    found: dict[Hashable, dict[Hashable, float]] = {}
    for number, entry in enumerate(_list(data, "edges", where)):
        place = f"{where}, edge {number}"
        source, target = _key(entry, "sourceId", place), _key(entry, "destId", place)
        for end in (source, target):
            if end not in nodes:
                raise PartitionError(f"{place}: there is no node {end!r}")
        found.setdefault(source, {})[target] = _number(entry, key, place, 0.0)
    return found


def _list(data: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    found = data.get(key)
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise ConfigError(f"{where}: {key!r} must be a list of objects")
    return found


def _key(entry: Mapping[str, Any], key: str, place: str) -> Hashable:
    value = entry.get(key)
    if not isinstance(value, (int, str)):
        raise ConfigError(f"{place}: {key!r} must be a number or text, got {value!r}")
    return value


def _number(entry: Mapping[str, Any], key: str, place: str, default: float | None = None) -> float:
    value = entry.get(key, default)
    if value is None:
        raise ConfigError(f"{place}: {key!r} is missing")
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if number == default:
        return number
    return _checked(number, value, f"{place}: {key}")


def _checked(number: float, value: object, what: str) -> float:
    if not (math.isfinite(number) and number >= 0):
        raise ConfigError(f"{what} must be a finite number >= 0, got {value!r}")
    return number
