"""Model FLOPs of a training step: what the mathematics needs, whatever the precision, layout or recomputation.

Forward plus backward (3 x forward; 2 x for frozen weights, which have no gradient), multiply and add counted as two.
GEMMs of every layer, of the router, of the head and of multi-token prediction are counted, ``top_k`` experts per
token; the input embedding is a look-up and costs nothing. A query of a causal sequence of s sees s / 2 key positions on
average, w - w^2 / 2s under a sliding window of w.
"""

from __future__ import annotations

from typing import NamedTuple

from dataset_builder.job.model import ModelSpec, adapter_parameters

_FORWARD_AND_BACKWARD = 3.0
_WITHOUT_WEIGHT_GRADIENT = 2.0


class _Forward(NamedTuple):
    """FLOPs of a forward pass: products with weights of the model, of activations with each other, with adapters."""

    weights: float
    scores: float = 0.0
    adapters: float = 0.0


def model_flops_per_sequence(
    model: ModelSpec, seq_length: int, target_seq_length: int | None = None, *, whole_causal: bool = False
) -> float:
    """Forward and backward FLOPs of one sequence.

    ``whole_causal`` counts the masked half of causal attention too, as Megatron-LM's and torchtitan's reports do.
    ``target_seq_length``: the decoder's length in an encoder-decoder, else without meaning.
    """
    if model.architecture == "encoder_decoder":
        target = target_seq_length or seq_length
        parts = [
            _stack_flops(model, model.encoder_layers, seq_length, [float(seq_length)]),
            _stack_flops(model, model.decoder_layers, target, _keys_by_layer(model, target, whole_causal)),
            _cross_attention_flops(model, seq_length, target),
            _Forward(_head_flops(model, target)),
        ]
    else:
        keys = _keys_by_layer(model, seq_length, whole_causal)
        parts = [_stack_flops(model, model.num_layers, seq_length, keys), _Forward(_head_flops(model, seq_length))]
        parts += [_mtp_flops(model, seq_length, keys)] * model.mtp_layers
    of_weights = _WITHOUT_WEIGHT_GRADIENT if model.lora else _FORWARD_AND_BACKWARD
    return sum(of_weights * part.weights + _FORWARD_AND_BACKWARD * (part.scores + part.adapters) for part in parts)


def _keys_by_layer(model: ModelSpec, length: int, whole_causal: bool) -> list[float]:
    """Key positions a query sees on average, in the layers of one period of full and sliding attention."""
    seen = length if whole_causal or not model.is_causal else length / 2
    if model.attention != "sliding" or model.window is None or model.window >= length:
        return [float(seen)]
    sliding = float(model.window if whole_causal else model.window - model.window**2 / (2 * length))
    if not model.full_attention_every:
        return [sliding]
    return [sliding] * (model.full_attention_every - 1) + [float(seen)]


def _stack_flops(model: ModelSpec, layers: int, tokens: int, keys_by_layer: list[float]) -> _Forward:
    """Self-attention and feed-forward of ``layers`` layers; ``keys_by_layer`` repeats from layer to layer."""
    weights = layers * _attention_weights(model) + _feed_forward_weights(model, layers)
    keys = sum(keys_by_layer[layer % len(keys_by_layer)] for layer in range(layers))
    adapters = layers * adapter_parameters(model)
    return _Forward(2.0 * tokens * weights, 2.0 * tokens * keys * _width_per_key(model), 2.0 * tokens * adapters)


def _width_per_key(model: ModelSpec) -> int:
    """Multiply-adds of one query with one key position: scores and weighted values."""
    if model.mla:
        per_head = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim + model.mla.v_head_dim
        return model.num_attention_heads * per_head
    return 2 * model.num_attention_heads * model.head_dim


def _attention_weights(model: ModelSpec) -> int:
    hidden, heads, mla = model.hidden_size, model.num_attention_heads, model.mla
    if mla is None:
        return 2 * hidden * model.head_dim * (heads + model.num_query_groups)
    query_width = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    queries = mla.q_lora_rank * (hidden + query_width) if mla.q_lora_rank else hidden * query_width
    keys = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    expanded = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return queries + keys + expanded + heads * mla.v_head_dim * hidden


def _feed_forward_weights(model: ModelSpec, layers: int) -> int:
    """Weights that a token passes in the feed-forwards of all layers."""
    per_width = (3 if model.is_gated else 2) * model.hidden_size
    moe = model.moe
    if moe is None:
        return layers * per_width * model.ffn_hidden_size
    dense = len({layer for layer in moe.dense_layers if layer < layers})
    mixture = model.hidden_size * moe.num_experts
    mixture += per_width * (moe.top_k * moe.expert_ffn_hidden_size + moe.shared_width)
    return dense * per_width * model.ffn_hidden_size + (layers - dense) * mixture


def _mtp_flops(model: ModelSpec, tokens: int, keys_by_layer: list[float]) -> _Forward:
    """One depth of multi-token prediction: its projection of 2h to h, a layer like the last, and the head again."""
    last, hidden = model.num_layers - 1, model.hidden_size
    weights = 2 * hidden * hidden + _attention_weights(model)
    weights += _feed_forward_weights(model, model.num_layers) - _feed_forward_weights(model, last)
    keys = keys_by_layer[last % len(keys_by_layer)]
    return _Forward(2.0 * tokens * weights + _head_flops(model, tokens), 2.0 * tokens * keys * _width_per_key(model))


def _cross_attention_flops(model: ModelSpec, source: int, target: int) -> _Forward:
    """Queries and output over the target's tokens, keys and values over the source's, in all decoder layers.

    Every pair is seen.
    """
    hidden, queries = model.hidden_size, model.num_attention_heads * model.head_dim
    keys = model.num_query_groups * model.head_dim
    projections = 2 * target * hidden * queries + 2 * source * hidden * keys
    rank = model.lora.rank if model.lora else 0
    adapters = 2 * rank * (target * (hidden + queries) + source * (hidden + keys))
    layers = 2.0 * model.decoder_layers
    return _Forward(layers * projections, layers * 2 * target * source * queries, layers * adapters)


def _head_flops(model: ModelSpec, tokens: int) -> float:
    hidden = model.hidden_size
    if model.head == "classification":
        return 2.0 * tokens * hidden * model.num_labels
    if model.head == "mlm":
        return 2.0 * tokens * model.masked_fraction * hidden * (model.vocab_size + hidden)
    return 2.0 * tokens * hidden * model.vocab_size
