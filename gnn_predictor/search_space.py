"""The layouts that a plan chooses from: candidates of every layout key, their combinations, and the jobs they make.

Searched by default, each with the job's own value among its candidates:

- ``parallel.tensor``: powers of two up to the GPUs that one intra-node link joins (a node, or an NVLink domain);
- ``parallel.pipeline``: divisors of the number of GPUs up to the number of layers and to ``MOST_STAGES``;
- ``parallel.virtual_pipeline``: 1, and up to ``MOST_CHUNKS`` model chunks a rank of equally many layers, where the
  embedding and the head may each stand for a layer;
- ``parallel.context``: powers of two that leave a rank ``LEAST_POSITIONS`` positions of the sequence;
- ``parallel.expert``: divisors of the number of experts up to ``MOST_EXPERT_RANKS``;
- ``parallel.sharding``: none, zero1, zero2, zero3, hsdp;
- ``batch.micro_batch_size``: powers of two up to ``MOST_TOKENS`` tokens;
- ``parallel.recompute``: none, selective, full.

``parallel.data`` follows from the others, and so does ``parallel.layers_per_stage``: where layers do not divide, the
last and the first chunks have one less. Nothing here loads torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dataset_builder.job.document import JobText
from dataset_builder.job.errors import JobError
from dataset_builder.job.parallel import LEAST_POSITIONS, Recompute
from dataset_builder.job.schema import TrainingJob
from gnn_predictor.compare import read_variants

KEYS = (
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.virtual_pipeline",
    "parallel.context",
    "parallel.expert",
    "parallel.sharding",
    "batch.micro_batch_size",
    "parallel.recompute",
)
MOST_STAGES = 32
MOST_CHUNKS = 8
MOST_TOKENS = 2**17
MOST_EXPERT_RANKS = 1024
_DERIVED = ("parallel.data", "parallel.layers_per_stage")


class Layout(NamedTuple):
    """One combination, in the order of :data:`KEYS`."""

    tensor: int
    pipeline: int
    virtual_pipeline: int
    context: int
    expert: int
    sharding: str | None
    micro_batch_size: int
    recompute: Recompute | None


@dataclass(frozen=True)
class SearchSpace:
    """The layouts of one job. ``chosen``: the other keys that were freed, at the values this job has of them."""

    job: TrainingJob
    chosen: Mapping[str, Any]
    candidates: Mapping[str, tuple[Any, ...]]  # of every key; virtual_pipeline's is empty where the pipeline decides
    fixed: frozenset[str]  # derived keys that stay as the job has them

    def __iter__(self) -> Iterator[Layout]:
        """All combinations, whether or not they can run."""
        of = self.candidates
        for tensor, pipeline, context, expert in itertools.product(
            of["parallel.tensor"], of["parallel.pipeline"], of["parallel.context"], of["parallel.expert"]
        ):
            for chunks, sharding, micro_batch, recompute in itertools.product(
                of["parallel.virtual_pipeline"] or self._chunk_counts(pipeline),
                of["parallel.sharding"],
                of["batch.micro_batch_size"],
                of["parallel.recompute"],
            ):
                yield Layout(tensor, pipeline, chunks, context, expert, sharding, micro_batch, recompute)

    def _chunk_counts(self, pipeline: int) -> list[int]:
        layers, own = self._num_layers, self.job.parallel.virtual_pipeline
        if pipeline == 1:
            return [1]
        extra = 2 if self._has_one_stack else 0
        equal = [
            chunks
            for chunks in range(1, MOST_CHUNKS + 1)
            if pipeline * chunks <= layers
            and not (layers % (pipeline * chunks) and (layers + extra) % (pipeline * chunks))
        ]
        return sorted({1, *equal, *([own] if pipeline == self.job.parallel.pipeline else [])})

    @property
    def _num_layers(self) -> int:
        return self.job.model.encoder_layers + self.job.model.decoder_layers

    @property
    def _has_one_stack(self) -> bool:
        return not (self.job.model.encoder_layers and self.job.model.decoder_layers)

    def problem(self, layout: Layout) -> str | None:
        """What keeps a layout from dividing, as far as its numbers alone say; or that it is another one again."""
        world, held = self.job.cluster.num_gpus, layout.tensor * layout.pipeline * layout.context
        if world % held:
            return "tensor x pipeline x context does not divide the GPUs"
        data, batch = world // held, self.job.batch.global_batch_size
        if batch % (data * layout.micro_batch_size):
            return "data x micro_batch_size does not divide the global batch"
        if layout.virtual_pipeline > 1 and batch // (data * layout.micro_batch_size) % layout.pipeline:
            return "interleaving needs microbatches that are a multiple of the pipeline's stages"
        if self._is_repeated(layout, data * layout.context):
            return "the same as another layout (nothing is left to shard)"
        return None

    def _is_repeated(self, layout: Layout, ranks: int) -> bool:
        """With one rank all shardings are one; an hsdp whose shards are all or single ranks is zero3 or none."""
        among = self.candidates["parallel.sharding"]
        if ranks == 1:
            return bool(layout.sharding != among[0])
        if layout.sharding != "hsdp":
            return False
        node = self.job.cluster.gpus_per_node
        shard = self.job.parallel.shard_size or math.gcd(ranks, max(1, node // layout.tensor))
        return (shard == ranks and "zero3" in among) or (shard == 1 and "none" in among)

    def applied(self, layout: Layout) -> TrainingJob:
        """The job with this layout; the values are valid, so nothing is validated again."""
        job = self.job
        changes: dict[str, Any] = {
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "virtual_pipeline": layout.virtual_pipeline,
            "context": layout.context,
            "expert": layout.expert,
            "sharding": layout.sharding,
            "recompute": layout.recompute,
        }
        if "parallel.data" not in self.fixed:
            changes["data"] = None
        if "parallel.layers_per_stage" not in self.fixed:
            changes["layers_per_stage"] = uneven_split(self._num_layers, layout.pipeline, layout.virtual_pipeline)
        batch = job.batch.model_copy(update={"micro_batch_size": layout.micro_batch_size})
        return job.model_copy(update={"parallel": job.parallel.model_copy(update=changes), "batch": batch})

    def settings(self, layout: Layout) -> dict[str, Any]:
        """Key paths and values that make the job file this job, as ``infer --set`` takes them."""
        values = {**self.chosen, **{key: _shown(value) for key, value in zip(KEYS, layout, strict=True)}}
        before, after = self.job.parallel, self.applied(layout).parallel
        if before.data is not None and "parallel.data" not in self.fixed:
            values["parallel.data"] = self.job.cluster.num_gpus // after.model_parallel_size
        if before.layers_per_stage != after.layers_per_stage:
            values["parallel.layers_per_stage"] = after.layers_per_stage and list(after.layers_per_stage)
        return values


def uneven_split(num_layers: int, pipeline: int, chunks: int) -> tuple[int, ...] | None:
    """Layers of every chunk where they do not divide: one less for the last, the first, the last but one, ..."""
    slots = pipeline * chunks
    if num_layers % slots == 0 or slots > num_layers + 2:
        return None
    counts = [num_layers // slots + 1] * slots
    for number in range(slots - num_layers % slots):
        counts[-1 - number // 2 if number % 2 == 0 else number // 2] -= 1
    return tuple(counts)


def search_spaces(
    text: JobText, settings: Mapping[str, Any], choices: Mapping[str, Sequence[Any]]
) -> list[SearchSpace]:
    """The spaces of a job file: one for each combination of the freed keys that are not layout keys.

    A layout key in ``settings`` stays at its value, one in ``choices`` takes those values. JobError lists every
    value that a job does not take.
    """
    others = {key: values for key, values in choices.items() if key not in KEYS}
    problems: dict[str, None] = {}
    freed: dict[str, tuple[Any, ...]] = {}
    variants: list[tuple[dict[str, Any], TrainingJob]] = []
    for key in (None, *(key for key in choices if key in KEYS)):
        try:
            variants_of_key = read_variants(text, settings, others if key is None else {key: choices[key]})
        except JobError as error:
            problems |= dict.fromkeys(error.reasons)
            continue
        if key is None:
            variants = variants_of_key
        else:
            freed[key] = tuple(_value(job, key) for _, job in variants_of_key)
    if problems:
        raise JobError(list(problems), source=text.name)
    fixed = frozenset(key for key in _DERIVED if key in settings or key in others)
    return [SearchSpace(job, chosen, _candidates(job, freed, settings), fixed) for chosen, job in variants]


def _candidates(
    job: TrainingJob, freed: Mapping[str, tuple[Any, ...]], settings: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    defaults = _defaults(job)
    found: dict[str, tuple[Any, ...]] = {}
    for key in KEYS:
        own = _value(job, key)
        if key in freed:
            found[key] = tuple(dict.fromkeys(freed[key]))
        elif key in settings:
            found[key] = (own,)
        elif key == "parallel.virtual_pipeline":
            found[key] = ()
        else:
            found[key] = tuple(dict.fromkeys([*defaults[key], *([] if own is None else [own])]))
    return found


def _defaults(job: TrainingJob) -> dict[str, list[Any]]:
    cluster, batch, model = job.resolved().cluster, job.batch, job.model
    world = cluster.num_gpus
    joined = max(cluster.gpus_per_node, (cluster.intra_node and cluster.intra_node.domain_size) or 1)
    layers = model.encoder_layers + model.decoder_layers
    experts = model.moe.num_experts if model.moe else 1
    return {
        "parallel.tensor": _powers_of_two(min(world, joined)),
        "parallel.pipeline": _divisors(world, min(layers, MOST_STAGES)),
        "parallel.context": _powers_of_two(min(world, batch.seq_length // LEAST_POSITIONS)),
        "parallel.expert": _divisors(experts, min(experts, world, MOST_EXPERT_RANKS)),
        "parallel.sharding": ["none", "zero1", "zero2", "zero3", "hsdp"],
        "batch.micro_batch_size": _powers_of_two(min(batch.global_batch_size, MOST_TOKENS // batch.seq_length)),
        "parallel.recompute": [Recompute(mode=mode) for mode in ("none", "selective", "full")],
    }


def _powers_of_two(most: int) -> list[int]:
    return [1 << exponent for exponent in range(max(1, most).bit_length())]


def _divisors(number: int, most: int) -> list[int]:
    return [each for each in range(1, most + 1) if number % each == 0]


def _value(job: TrainingJob, key: str) -> Any:
    part, name = key.split(".")
    return getattr(getattr(job, part), name)


def _shown(value: Any) -> Any:
    if not isinstance(value, Recompute):
        return value
    return value.mode if value.full_layers is None else {"full_layers": value.full_layers}
