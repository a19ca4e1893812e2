"""What cannot run is refused by name before any weight is read, and what can is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hybrid.models.attention import ATTENTION_NAME
from hybrid.models.empty import skeleton
from hybrid.models.loading import load_causal_lm, open_causal_lm, open_value_model, resolve_model
from hybrid.models.supported import require_supported
from tests.decoders import CUT_FAMILIES, MORE_FAMILIES, tiny_decoder
from tests.unit.models.test_opening import make

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
# By family: what its configuration says, and the reason.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bamba": ({}, "its layers are of type linear_attention"),
    "bart": ({}, "layers.0.self_attn and model.decoder.layers.0.encoder_attn both attend as layer 0"),
    "bert": (SMALL, "BertSelfAttention is bidirectional"),
    "bloom": ({"hidden_size": 32, "n_head": 4}, "none of its layers uses transformers' attention interface"),
    "deepseek_v32": ({}, "its layers are of type indexed_attention"),
    "diffllama": (SMALL, "its layers attend twice"),
    "doge": (SMALL, "its layers weigh keys by a mask that they compute"),
    "dory": ({}, "goes through some of its layers several times"),
    "falcon": ({**SMALL, "alibi": True}, "(has attention classes of its own|adds a bias to its scores, by distance)"),
    "falcon_h1": ({}, "its layers are of type hybrid"),
    "falcon_mamba": ({}, "its layers are of type linear_attention"),
    "flint": ({}, "FlintAttention has attention sinks"),
    "gemma4_text": ({}, "its layers differ in elements a head"),
    "gpt_neo": ({}, "has attention classes of its own"),
    "gpt_oss": ({}, r"GptOssAttention has attention sinks \(sinks\)"),
    "hrm_text": ({}, "both attend as layer 0"),
    "jamba": ({}, "its layers are of type linear_attention"),
    "lfm2": ({"layer_types": ["conv", "full_attention"] * 16}, "its layers are of type conv"),
    "llama4_text": ({}, "its layers are of type chunked_attention"),
    "mamba": ({}, "its layers are of type linear_attention"),
    "minimax": ({}, "its layers are of type linear_attention"),
    "mllama": ({}, "MllamaTextCrossAttention attends to something else"),
    "modernbert-decoder": ({}, "lies outside of its body"),
    "moshi": ({}, "MoshiAttention has a sliding window that it does not pass"),
    "mpt": ({}, "none of its layers uses transformers' attention interface"),
    "nemotron_h": ({}, "its layers are of type linear_attention"),
    "qwen3_5": ({}, "its layers are of type linear_attention"),
    "qwen3_next": ({}, "its layers are of type linear_attention"),
    "recurrent_gemma": ({}, "its layers are of type linear_attention"),
    "roberta": ({**SMALL, "is_decoder": True}, "RobertaEmbeddings counts positions from its padding id"),
    "rwkv": ({}, "none of its layers uses transformers' attention interface"),
    "xglm": ({}, "none of its layers uses transformers' attention interface"),
    "zamba2": ({}, "its layers are of type hybrid"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_run_is_refused_by_name_with_the_reason(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have it")
    overrides, reason = REFUSED[family]
    with pytest.raises(ValueError, match=f"(?s)^{family.split('_5')[0]}.*{reason}.*choose another family"):
        skeleton(AutoConfig.for_model(family, **overrides))


@pytest.mark.parametrize("family", [*CUT_FAMILIES, *MORE_FAMILIES])
def test_what_runs_is_not(family: str) -> None:
    require_supported(tiny_decoder(family))


def test_a_layer_with_a_convolution_and_one_without_attention_are_refused() -> None:
    model = tiny_decoder("llama")
    model.model.layers[1].conv = torch.nn.Conv1d(4, 4, 2)
    with pytest.raises(ValueError, match=r"llama: model.layers.1.conv is a convolution along the sequence"):
        require_supported(model)
    model = tiny_decoder("llama")
    model.model.layers[2].self_attn = torch.nn.Identity()
    with pytest.raises(ValueError, match="llama: its layers 2 have no causal self-attention"):
        require_supported(model)


def save(family: str, directory: Path) -> str:
    make(family).save_pretrained(directory)
    return str(directory)


def test_a_checkpoint_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    resolved = resolve_model(save("gpt_oss", tmp_path))
    for load in (load_causal_lm, open_causal_lm):
        with pytest.raises(ValueError, match="gpt_oss: GptOssAttention has attention sinks"):
            load(resolved, torch.float32)


def test_so_is_one_of_a_value_model(tmp_path: Path) -> None:
    config = AutoConfig.for_model("bert", **SMALL, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="bert: BertSelfAttention is bidirectional"):
        open_value_model(resolve_model(str(tmp_path)), torch.float32)


def test_a_loaded_model_rotates_sequences_by_themselves(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    tiny_decoder("llama", "eager", rope_parameters=rope).save_pretrained(tmp_path)
    resolved = resolve_model(str(tmp_path))
    model: PreTrainedModel
    for model in (load_causal_lm(resolved, torch.float32), open_causal_lm(resolved, torch.float32).module):
        own = AutoModelForCausalLM.from_config(model.config, attn_implementation=ATTENTION_NAME).model.rotary_emb
        assert type(model.model.rotary_emb) is not type(own)
        assert isinstance(model.model.rotary_emb, type(own))
