"""The shape of a transformer and its exact number of parameters.

Megatron's names are canonical; the spellings of Hugging Face and torchtitan are aliases. Sizes that a transformer
usually derives (``ffn_hidden_size = 4 h``, ``head_dim = h / heads``, ``num_query_groups = heads``) may be left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dataset_builder.job.values import Count, CountOrZero, Frozen

Activation = Literal["swiglu", "geglu", "gelu", "relu", "squared_relu"]
GATED_ACTIVATIONS = ("swiglu", "geglu")


class MoESpec(Frozen):
    """Mixture-of-experts layers. ``dense_layers`` are the indices of layers that keep the dense feed-forward."""

    num_experts: Count
    top_k: Count
    expert_ffn_hidden_size: Count
    num_shared_experts: CountOrZero = 0
    shared_expert_ffn_hidden_size: CountOrZero | None = None
    dense_layers: tuple[CountOrZero, ...] = ()
    capacity_factor: Annotated[float, Field(gt=0)] | None = None


class MLASpec(Frozen):
    """Multi-head latent attention of DeepSeek-V2 (arXiv 2405.04434); ``q_lora_rank`` absent: queries uncompressed."""

    q_lora_rank: Count | None = None
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count


class ModelSpec(Frozen):
    """A transformer. Every size is complete after validation; ``vocab_size`` is used as given, without padding."""

    name: str | None = None
    architecture: Literal["decoder", "encoder", "encoder_decoder"] = "decoder"
    num_layers: Count
    num_encoder_layers: CountOrZero | None = None
    num_decoder_layers: CountOrZero | None = None
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
    tie_embeddings: bool = True
    bias: bool = True
    qkv_bias: bool | None = None
    position_embedding: Literal["rope", "learned", "alibi", "relative", "none"] = "learned"
    attention: Literal["causal", "full", "sliding"] | None = None
    window: Count | None = None
    full_attention_every: Count | None = None
    qk_norm: bool = False
    post_norm: bool = False
    parallel_block: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    mlm_head: bool = False
    moe: MoESpec | None = None
    mla: MLASpec | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_usual_sizes(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = {_CANONICAL.get(key, key): value for key, value in data.items()}
        if data.get("num_layers") is None and data.get("num_decoder_layers") is not None:
            data["num_layers"] = data["num_decoder_layers"]
        defaults = {
            "num_query_groups": lambda: data["num_attention_heads"],
            "ffn_hidden_size": lambda: 4 * int(data["hidden_size"]),
            "head_dim": lambda: int(data["hidden_size"]) // int(data["num_attention_heads"]),
        }
        for key, value in defaults.items():
            if data.get(key) is None:
                try:
                    data[key] = value()
                except (KeyError, TypeError, ValueError, ZeroDivisionError):
                    data.pop(key, None)  # the missing or broken size it derives from is reported itself
        return data

    @model_validator(mode="after")
    def _check_shape(self) -> ModelSpec:
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_query_groups: {self.num_query_groups} does not divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.attention == "sliding" and self.window is None:
            raise ValueError("window: needed with attention: sliding, e.g. window: 4096")
        if self.moe and self.moe.top_k > self.moe.num_experts:
            raise ValueError(f"moe.top_k: {self.moe.top_k} is more than num_experts {self.moe.num_experts}")
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


_CANONICAL = {
    "num_hidden_layers": "num_layers", "n_layers": "num_layers", "n_layer": "num_layers",
    "dim": "hidden_size", "n_embd": "hidden_size", "d_model": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "n_heads": "num_attention_heads", "n_head": "num_attention_heads",
    "num_key_value_heads": "num_query_groups", "n_kv_heads": "num_query_groups",
    "kv_channels": "head_dim", "padded_vocab_size": "vocab_size",
    "tie_word_embeddings": "tie_embeddings", "sliding_window": "window",
}  # fmt: skip
