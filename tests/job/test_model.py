"""Parameter counts and FLOPs of the shipped models against published figures."""

import pytest
from pydantic import ValidationError

from dataset_builder.job.flops import model_flops_per_sequence
from dataset_builder.job.model import ModelSpec, active_parameters, num_parameters
from dataset_builder.job.presets import preset_names, published_parameters


def model(**sizes: object) -> ModelSpec:
    return ModelSpec.model_validate(sizes)


@pytest.mark.parametrize("name", preset_names())
def test_parameters_of_presets_are_as_published(name: str) -> None:
    spec = model(preset=name)
    published, active, source = published_parameters(name)
    count = num_parameters(spec)
    assert source
    if published % 1e6:
        assert count == published, "weight files are counted to the last parameter"
    else:
        assert count == pytest.approx(published, rel=2e-2), "papers round to two digits"
    if active is None:
        assert active_parameters(spec) == count
    else:  # some papers leave the embedding and the head out
        embeddings = 2 * spec.vocab_size * spec.hidden_size
        assert 0.98 * (active_parameters(spec) - embeddings) <= active <= 1.02 * active_parameters(spec)


def test_there_are_enough_presets() -> None:
    assert len(preset_names()) >= 30


def test_a_gated_feed_forward_has_three_matrices() -> None:
    qwen = model(
        num_layers=80, hidden_size=8192, ffn_hidden_size=24576, num_attention_heads=64, vocab_size=152064,
        activation="swiglu", normalization="rmsnorm", bias=False, qkv_bias=True, position_embedding="rope",
        tie_embeddings=False,
    )  # fmt: skip
    assert num_parameters(qwen) == pytest.approx(72.28e9, rel=1e-3)
    two_matrices = qwen.model_copy(update={"activation": "gelu"})
    assert num_parameters(two_matrices) == pytest.approx(56.18e9, rel=1e-3)


def test_flops_count_active_experts_and_causal_attention_once() -> None:
    qwen = model(preset="qwen3-30b-a3b")
    assert model_flops_per_sequence(qwen, 8192, whole_causal=True) / 8192 == pytest.approx(37.58e9, rel=1e-3)
    assert model_flops_per_sequence(qwen, 8192) / 8192 == pytest.approx(27.9e9, rel=1e-3)
    mixtral = model(preset="mixtral-8x7b")
    assert model_flops_per_sequence(mixtral, 2048, whole_causal=True) / 2048 == pytest.approx(79.7e9, rel=1e-3)


def test_flops_count_the_head_but_not_the_input_embedding() -> None:
    tied = model(preset="qwen3-0.6b")
    untied = tied.model_copy(update={"tie_embeddings": False})
    assert model_flops_per_sequence(tied, 4096) == model_flops_per_sequence(untied, 4096)
    doubled = tied.model_copy(update={"vocab_size": 2 * tied.vocab_size})
    head = (model_flops_per_sequence(doubled, 4096) - model_flops_per_sequence(tied, 4096)) / 4096
    assert head == pytest.approx(6 * tied.vocab_size * tied.hidden_size)


def test_published_flops_of_megatron() -> None:
    # Narayanan et al. 2021, arXiv 2104.04473, equation 3 without recomputation: 72 b s l h^2 (1 + s/6h + v/12lh)
    gpt = model(preset="gpt-22b")
    s, layers, h, v = 2048, 48, 6144, 51200
    expected = 72 * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model_flops_per_sequence(gpt, s, whole_causal=True) == pytest.approx(expected, rel=1e-9)


def test_a_sliding_window_sees_fewer_keys() -> None:
    mistral = model(preset="mistral-7b")
    full = mistral.model_copy(update={"attention": "causal", "window": None})
    assert model_flops_per_sequence(mistral, 4096) == model_flops_per_sequence(full, 4096)
    assert model_flops_per_sequence(mistral, 32768) < model_flops_per_sequence(full, 32768)
    gemma = model(preset="gemma2-9b")
    all_sliding = gemma.model_copy(update={"full_attention_every": None})
    assert model_flops_per_sequence(all_sliding, 32768) < model_flops_per_sequence(gemma, 32768)


def test_an_encoder_decoder_pays_for_both_lengths() -> None:
    t5 = model(preset="t5-3b")
    short = model_flops_per_sequence(t5, 512, 128)
    assert short < model_flops_per_sequence(t5, 512, 512)
    # Twice the work of an equal decoder's would be 6 parameters a token; the encoder's tokens skip half of them.
    assert 0.4 < short / (6 * num_parameters(t5) * 512) < 1.0


def test_a_classification_head_replaces_the_vocabulary():
    sizes = {"preset": "bert-large", "overrides": {"head": "classification", "num_labels": 3}}
    full, labels = ModelSpec.model_validate({"preset": "bert-large"}), ModelSpec.model_validate(sizes)
    transform = 1024**2 + 3 * 1024 + 30522
    assert num_parameters(full) - num_parameters(labels) == transform - 3 * 1025
    assert num_parameters(labels.model_copy(update={"tie_embeddings": False})) == num_parameters(labels)


def test_only_a_masked_head_has_a_masked_fraction():
    with pytest.raises(ValueError, match="masked_fraction"):
        ModelSpec.model_validate({"preset": "llama3-8b", "overrides": {"masked_fraction": 0.15}})


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"hidden_size": -3}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 1e30}, "hidden_size"),
        ({"num_attention_heads": -16}, "num_attention_heads"),
        ({"num_attention_heads": 4096}, "num_attention_heads"),
        ({"num_layers": None, "num_decoder_layers": -2}, "num_decoder_layers"),
    ],
    ids=str,
)
def test_only_what_is_written_is_told_to_be_wrong(changes, wrong) -> None:
    sizes = {"num_layers": 2, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 32000, **changes}
    with pytest.raises(ValidationError) as caught:
        model(**sizes)
    (error,) = caught.value.errors()
    assert wrong in (*error["loc"], error["msg"].removeprefix("Value error, ").partition(":")[0])
    assert "\n" not in error["msg"]
