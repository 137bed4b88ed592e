"""Networks that training goes on from: the members of a checkpoint, with room for what they never saw."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import cast

import torch
from torch import Tensor

from gnn_predictor.checkpoint import Checkpoint, CheckpointError
from gnn_predictor.network import Ensemble, NetworkConfig, Predictor


@dataclass(frozen=True, eq=False)
class Start:
    """What fits start from in place of random weights; fit ``n`` of an ensemble from member ``n``, counted round."""

    members: tuple[Predictor, ...]
    digest: str  # of their weights

    def of(self, number: int) -> Predictor:
        """The network that this fit starts from."""
        return self.members[number % len(self.members)]


def known_devices(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Those with a learned vector, in the order of the vectors."""
    return tuple(checkpoint.config.network["devices"])


def known_libraries(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The same of libraries."""
    return tuple(checkpoint.config.network["libraries"])


def config_of(checkpoint: Checkpoint) -> NetworkConfig:
    """The configuration of a checkpoint's networks."""
    vectors = {"devices": known_devices(checkpoint), "libraries": known_libraries(checkpoint)}
    return NetworkConfig(**{**checkpoint.config.network, **vectors})


def start_from(checkpoint: Checkpoint, config: NetworkConfig, blind: bool = False) -> Start:
    """The networks of a checkpoint, or with ``blind`` its baseline B3, as networks of this configuration.

    ``config.devices`` and ``config.libraries`` begin with the checkpoint's; a new one's vector starts at zero, as that
    of an unknown one.
    Raises CheckpointError where another size, a calibration or a missing B3 makes it no start for this training.
    """
    there = config_of(checkpoint)
    if checkpoint.config.adapter is not None:
        raise _refused(checkpoint, "is a calibration; give the checkpoint that it calibrates")
    names = [field.name for field in fields(config)]
    sizes = [name for name in names if name not in ("devices", "libraries") and "dropout" not in name]
    for name in sizes:
        if getattr(there, name) != getattr(config, name):
            has, asked = getattr(there, name), getattr(config, name)
            raise _refused(checkpoint, f"has network.{name}={has}, this training {asked}; give it the checkpoint's")
    tensors = checkpoint.blind if blind else checkpoint.tensors
    if tensors is None:
        raise _refused(checkpoint, "has no baseline B3 to start from; train with protocols.b3=false")
    ensemble = Ensemble.from_tensors(there, tensors)
    members = tuple(_with_vectors(cast(Predictor, member), config) for member in ensemble.members)
    return Start(members, _digest(tensors))


def _refused(checkpoint: Checkpoint, reason: str) -> CheckpointError:
    return CheckpointError(f"finetune_from: checkpoint {checkpoint.path}: {reason}")


def _with_vectors(network: Predictor, config: NetworkConfig) -> Predictor:
    """The same network with a vector for each of these devices and libraries."""
    tensors = dict(network.state_dict())
    for name, known in (("device.weight", config.devices), ("library.weight", config.libraries)):
        new = torch.zeros(len(known) + 1 - len(tensors[name]), tensors[name].shape[1])
        tensors[name] = torch.cat([tensors[name], new])
    grown = Predictor(config)
    grown.load_state_dict(tensors)
    return grown


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].numpy().tobytes())
    return digest.hexdigest()
