"""The shape of a transformer.

Megatron's names are canonical; the spellings of Hugging Face and torchtitan are aliases. Sizes that a transformer
usually derives (``ffn_hidden_size = 4 h``, ``head_dim = h / heads``, ``num_query_groups = heads``) may be left out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, model_validator

from dataset_builder.job.presets import preset
from dataset_builder.job.values import Count, CountOrZero, Frozen, WalkedCountOrZero

Activation = Literal["swiglu", "geglu", "gelu", "relu", "squared_relu"]
GATED_ACTIVATIONS = ("swiglu", "geglu")


class MoESpec(Frozen):
    """Mixture-of-experts layers; ``dense_layers`` are the indices of layers that keep the dense feed-forward.

    ``shared_expert_ffn_hidden_size`` is the width of all shared experts together.
    """

    num_experts: Count
    top_k: Count
    expert_ffn_hidden_size: Count
    num_shared_experts: CountOrZero = 0
    shared_expert_ffn_hidden_size: CountOrZero | None = None
    dense_layers: tuple[CountOrZero, ...] = ()
    capacity_factor: Annotated[float, Field(gt=0)] | None = None

    @property
    def shared_width(self) -> int:
        """Inner width of all shared experts together; 0 without any."""
        if self.shared_expert_ffn_hidden_size is not None:
            return self.shared_expert_ffn_hidden_size
        return self.num_shared_experts * self.expert_ffn_hidden_size


class MLASpec(Frozen):
    """Multi-head latent attention of DeepSeek-V2 (arXiv 2405.04434); ``q_lora_rank`` absent: queries uncompressed."""

    q_lora_rank: Count | None = None
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count


class LoRASpec(Frozen):
    """Low-rank adapters on frozen weights (arXiv 2106.09685): ``x A B`` of inner width ``rank`` beside each target.

    ``targets``: the projections of attention, or those of the dense feed-forward as well. Only adapters are trained.
    """

    rank: Count = 16
    targets: Literal["attention", "attention_and_mlp"] = "attention"


class ModelSpec(Frozen):
    """A transformer. Every size is complete after validation; ``vocab_size`` is used as given, without padding.

    ``head``: a projection to the vocabulary (``lm``), the same behind a dense layer and a norm (``mlm``, BERT), or to
    ``num_labels`` per position (``classification``: fine-tuning). An ``mlm`` head that first gathers the masked
    positions, as NVIDIA's BERT does, computes ``masked_fraction`` of them (80 of 512, 20 of 128: 0.15625).

    ``mtp_layers``: depths of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2) beside the head. Each
    joins the stream with the next tokens' embeddings (two norms and a projection of 2h to h), runs one more layer like
    the last, and the head again; the tables of embedding and head are shared.
    """

    name: str | None = None
    architecture: Literal["decoder", "encoder", "encoder_decoder"] = "decoder"
    num_layers: WalkedCountOrZero
    num_encoder_layers: WalkedCountOrZero | None = None
    num_decoder_layers: WalkedCountOrZero | None = None
    hidden_size: Count
    ffn_hidden_size: Count
    num_attention_heads: Count
    num_query_groups: Count
    head_dim: Count
    vocab_size: Count
    max_position_embeddings: Count | None = None
    num_token_types: CountOrZero = 0
    activation: Activation = "gelu"
    normalization: Literal["rmsnorm", "layernorm"] = "layernorm"
    norm_affine: bool = True
    norm_bias: bool | None = None  # of a layernorm; None: as ``bias``
    tie_embeddings: bool = True
    bias: bool = True
    qkv_bias: bool | None = None
    position_embedding: Literal["rope", "learned", "alibi", "relative", "none"] = "learned"
    attention: Literal["causal", "full", "sliding"] | None = None
    relative_buckets: Count = 32
    window: Count | None = None
    full_attention_every: Count | None = None
    qk_norm: bool = False
    qk_norm_over: Literal["head", "projection"] = "head"
    post_norm: bool = False
    parallel_block: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    mtp_layers: WalkedCountOrZero = 0
    head: Literal["lm", "mlm", "classification"] = "lm"
    num_labels: Count = 2
    masked_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    moe: MoESpec | None = None
    mla: MLASpec | None = None
    lora: LoRASpec | None = None
    assumed: tuple[str, ...] = Field(default=(), exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        return _fill_usual_sizes(_spelt_canonically(_chosen(data, (info.context or {}).get("folder"))))

    @model_validator(mode="after")
    def _check_shape(self) -> ModelSpec:
        wrong = []
        heads, groups, hidden = self.num_attention_heads, self.num_query_groups, self.hidden_size
        if heads % groups:
            wrong.append(f"num_query_groups: got {groups}; expected a divisor of num_attention_heads {heads}")
        if hidden % heads and self.head_dim == max(1, hidden // heads):
            wrong.append(f"num_attention_heads: got {heads}; expected a divisor of hidden_size {hidden}, or a head_dim")
        if self.attention == "sliding" and self.window is None:
            wrong.append("window: missing; expected with attention: sliding, e.g. window: 4096")
        if self.moe and self.lora and self.lora.targets != "attention":
            wrong.append(f"lora.targets: got {self.lora.targets} with experts; expected attention")
        if self.moe and self.moe.top_k > self.moe.num_experts:
            wrong.append(f"moe.top_k: got {self.moe.top_k}; expected at most num_experts {self.moe.num_experts}")
        if self.moe and self.moe.dense_layers and max(self.moe.dense_layers) >= self.num_layers:
            wrong.append(
                f"moe.dense_layers: got {max(self.moe.dense_layers)}; expected layer indices below {self.num_layers}"
            )
        if self.mtp_layers and (self.architecture != "decoder" or self.head != "lm"):
            wrong.append(f"mtp_layers: got {self.mtp_layers}; expected 0 but for a decoder with head: lm")
        if self.masked_fraction < 1 and self.head != "mlm":
            wrong.append(f"masked_fraction: got {self.masked_fraction} with head {self.head}; expected head: mlm")
        if self.architecture != "encoder_decoder" and self.encoder_layers + self.decoder_layers == 0:
            wrong.append("num_layers: got 0; expected at least 1")
        if wrong:
            raise ValueError("\n".join(wrong))
        return self

    @property
    def is_gated(self) -> bool:
        return self.activation in GATED_ACTIVATIONS

    @property
    def encoder_layers(self) -> int:
        """Encoder layers; 0 for a decoder."""
        if self.architecture == "encoder":
            return self.num_layers
        if self.architecture == "encoder_decoder":
            return self.num_layers if self.num_encoder_layers is None else self.num_encoder_layers
        return 0

    @property
    def decoder_layers(self) -> int:
        """Decoder layers; 0 for an encoder."""
        if self.architecture == "encoder":
            return 0
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def is_causal(self) -> bool:
        return self.attention != "full" if self.attention else self.architecture != "encoder"


def _chosen(data: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """The sizes behind the one way a model is given: preset, config, or sizes (also written out directly)."""
    ways = [way for way in ("preset", "config", "sizes") if data.get(way) is not None]
    direct = [key for key in data if key not in ("preset", "config", "sizes", "overrides", "name")]
    if len(ways) > 1 or (ways and direct):
        given = " and ".join([*ways, *direct[:3]])
        raise ValueError(
            f"got {given}; expected exactly one of preset, config and sizes; changes to a preset go under overrides"
        )
    overrides = data.get("overrides") or {}
    if not isinstance(overrides, dict):
        raise ValueError("overrides: expected a mapping of sizes, e.g. {num_layers: 40}")
    if ways in ([], ["sizes"]) and overrides:
        raise ValueError("overrides: got sizes to override; expected them beside a preset or a config only")
    sizes = {key: data[key] for key in direct}
    if ways == ["preset"]:
        sizes = preset(data["preset"])
    elif ways == ["config"]:
        from dataset_builder.job.importers.huggingface import read_config  # most jobs do not need it

        sizes = read_config(data["config"], folder or Path())
    elif ways == ["sizes"]:
        if not isinstance(data["sizes"], dict):
            raise ValueError("sizes: expected a mapping of sizes, e.g. {num_layers: 32, hidden_size: 4096, ...}")
        sizes = dict(data["sizes"])
    name = {"name": data["name"]} if data.get("name") is not None else {}
    return {**_merged(sizes, _spelt_canonically(overrides)), **name}


def _merged(sizes: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """``overrides`` over ``sizes``; the parts (``moe``, ``mla``) merge key by key."""
    merged = dict(sizes)
    for key, value in overrides.items():
        below = merged.get(key)
        merged[key] = {**below, **value} if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _spelt_canonically(data: dict[str, Any]) -> dict[str, Any]:
    spelt: dict[str, Any] = {}
    for key, value in data.items():
        canonical = _CANONICAL.get(key, key)
        if canonical in spelt and spelt[canonical] != value:
            raise ValueError(f"{key}: got {value!r} beside another spelling of {canonical}; expected one of them")
        spelt[canonical] = value
    return spelt


def _fill_usual_sizes(data: dict[str, Any]) -> dict[str, Any]:
    """Derives the sizes a transformer usually derives; a broken size is left for the field check to report."""
    data = dict(data)

    def whole(key: str) -> int:
        number = int(float(data[key]))
        if not 0 <= number <= 10**18:
            raise ValueError(key)
        return number

    derived: dict[str, Callable[[], int]] = {
        "num_query_groups": lambda: whole("num_attention_heads"),
        "ffn_hidden_size": lambda: 4 * whole("hidden_size"),
        "head_dim": lambda: whole("hidden_size") // whole("num_attention_heads"),
    }
    if data.get("num_decoder_layers") is not None:
        derived["num_layers"] = lambda: min(whole("num_decoder_layers"), 10_000)
    for key, derive in derived.items():
        if data.get(key) is None:
            try:
                data[key] = max(1, derive())
            except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
                data[key] = 1  # what it derives from is missing or broken, and is reported itself
    return data


_CANONICAL = {
    "mtp_num_layers": "mtp_layers", "num_nextn_predict_layers": "mtp_layers",
    "num_hidden_layers": "num_layers", "n_layers": "num_layers", "n_layer": "num_layers",
    "dim": "hidden_size", "n_embd": "hidden_size", "d_model": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "n_heads": "num_attention_heads", "n_head": "num_attention_heads",
    "num_key_value_heads": "num_query_groups", "n_kv_heads": "num_query_groups",
    "kv_channels": "head_dim", "padded_vocab_size": "vocab_size",
    "tie_word_embeddings": "tie_embeddings", "sliding_window": "window",
}  # fmt: skip


def num_parameters(model: ModelSpec) -> int:
    """Every parameter of the model, as the reference implementations count them; tied embeddings count once.

    Adapters (``lora``) are :func:`adapter_parameters`, not counted here.
    Learned positions need ``max_position_embeddings``. Modules of multi-token prediction share embedding and head.
    """
    return _count_parameters(model, model.moe.num_experts if model.moe else 0)


def active_parameters(model: ModelSpec) -> int:
    """Parameters that one token passes: ``top_k`` of the experts, everything else whole."""
    return _count_parameters(model, model.moe.top_k if model.moe else 0)


def adapter_parameters(model: ModelSpec) -> int:
    """Parameters of one layer's adapters of self-attention (and feed-forward); cross-attention's are as many again.

    One pair of matrices a projection, as PEFT has them; stacks that fuse query, key and value share the first.
    """
    if model.lora is None:
        return 0
    hidden, heads, mla = model.hidden_size, model.num_attention_heads, model.mla
    queries, keys = heads * model.head_dim, model.num_query_groups * model.head_dim
    widths = [hidden + queries, 2 * (hidden + keys), queries + hidden]
    if mla:
        queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        rank = mla.q_lora_rank
        widths = [hidden + rank, rank + queries] if rank else [hidden + queries]
        widths.append(hidden + mla.kv_lora_rank + mla.qk_rope_head_dim)
        widths.append(mla.kv_lora_rank + heads * (mla.qk_nope_head_dim + mla.v_head_dim))
        widths.append(heads * mla.v_head_dim + hidden)
    if model.lora.targets == "attention_and_mlp":
        widths.append((3 if model.is_gated else 2) * (hidden + model.ffn_hidden_size))
    return model.lora.rank * sum(widths)


def attention_parameters(model: ModelSpec) -> int:
    """Projections of one self- or cross-attention with their biases and norms on queries and keys."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.mla:
        return _mla_parameters(model, model.mla)
    queries, keys = heads * model.head_dim, model.num_query_groups * model.head_dim
    weights = hidden * (queries + 2 * keys) + queries * hidden
    qkv_bias = model.bias if model.qkv_bias is None else model.qkv_bias
    biases = (queries + 2 * keys) * qkv_bias + hidden * model.bias
    normed = 2 * model.head_dim if model.qk_norm_over == "head" else queries + keys
    return weights + biases + normed * model.qk_norm


def feed_forward_parameters(model: ModelSpec, width: int) -> int:
    """Weights and biases of one feed-forward of inner ``width``; a gated one has three matrices."""
    matrices = 3 if model.is_gated else 2
    return matrices * model.hidden_size * width + model.bias * ((matrices - 1) * width + model.hidden_size)


def _mla_parameters(model: ModelSpec, mla: MLASpec) -> int:
    hidden, heads = model.hidden_size, model.num_attention_heads
    query_width = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank:
        queries = hidden * mla.q_lora_rank + mla.q_lora_rank + mla.q_lora_rank * query_width
    else:
        queries = hidden * query_width
    down = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
    up = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return queries + down + up + heads * mla.v_head_dim * hidden


def _norm_parameters(model: ModelSpec) -> int:
    if not model.norm_affine:
        return 0
    has_bias = model.bias if model.norm_bias is None else model.norm_bias
    return model.hidden_size * (2 if model.normalization == "layernorm" and has_bias else 1)


def _count_parameters(model: ModelSpec, experts: int) -> int:
    """``experts``: the routed experts counted in each mixture layer."""
    norm, attention = _norm_parameters(model), attention_parameters(model)
    norms = norm * ((1 if model.parallel_block else 2) + 2 * model.post_norm)
    dense = feed_forward_parameters(model, model.ffn_hidden_size)
    layers = model.encoder_layers + model.decoder_layers
    total = layers * (attention + norms)
    if model.architecture == "encoder_decoder":
        total += model.decoder_layers * (attention + norm)  # cross-attention
    if model.moe:
        dense_layers = len(set(model.moe.dense_layers))
        total += dense_layers * dense + (layers - dense_layers) * _mixture_parameters(model, model.moe, experts)
    else:
        total += layers * dense
    total += model.mtp_layers * _mtp_parameters(model, experts)
    return total + _embedding_parameters(model, norm)


def _mtp_parameters(model: ModelSpec, experts: int) -> int:
    """One depth of multi-token prediction: its projection and three norms, and a layer like the last of the model."""
    norm, hidden, moe = _norm_parameters(model), model.hidden_size, model.moe
    norms = norm * ((1 if model.parallel_block else 2) + 2 * model.post_norm + 3)
    if moe is None or model.num_layers - 1 in moe.dense_layers:
        feed_forward = feed_forward_parameters(model, model.ffn_hidden_size)
    else:
        feed_forward = _mixture_parameters(model, moe, experts)
    return 2 * hidden * hidden + model.bias * hidden + norms + attention_parameters(model) + feed_forward


def _mixture_parameters(model: ModelSpec, moe: MoESpec, experts: int) -> int:
    router = model.hidden_size * moe.num_experts
    shared = feed_forward_parameters(model, moe.shared_width) if moe.shared_width else 0
    return router + experts * feed_forward_parameters(model, moe.expert_ffn_hidden_size) + shared


def _embedding_parameters(model: ModelSpec, norm: int) -> int:
    """Embeddings, heads and the norms outside the layers."""
    hidden, vocab = model.hidden_size, model.vocab_size
    total = vocab * hidden * (1 if model.tie_embeddings or model.head == "classification" else 2)
    total += norm * (2 if model.architecture == "encoder_decoder" else 1)  # BERT's stands behind its embedding
    total += model.num_token_types * hidden
    if model.position_embedding == "learned":
        total += (model.max_position_embeddings or 0) * hidden
    if model.position_embedding == "relative":
        stacks = (model.encoder_layers > 0) + (model.decoder_layers > 0)
        total += stacks * model.relative_buckets * model.num_attention_heads
    if model.head == "mlm":
        total += hidden * hidden + hidden + norm + vocab
    if model.head == "classification":
        total += (hidden + 1) * model.num_labels
    return total
