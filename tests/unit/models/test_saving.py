"""What the writer leaves is what transformers loads, and a save that fails leaves what was there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedModel,
)

from hybrid.models import saving
from hybrid.models.loading import load_causal_lm, open_causal_lm, resolve_model
from hybrid.models.saving import ModelWriter
from tests.decoders import CUT_FAMILIES, tiny_decoder
from tests.tiny import save_tiny_llama, save_tiny_reward_model

_EXPERTS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
}


def make(family: str) -> PreTrainedModel:
    if family in CUT_FAMILIES:
        return tiny_decoder(family, attention="eager")
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape, **heads, **_EXPERTS[family]))


def write(module: PreTrainedModel, directory: Path, **options: Any) -> None:
    write_all(module, directory, module.named_parameters(), **options)


def write_all(
    module: PreTrainedModel, directory: Path, parameters: Iterable[tuple[str, torch.Tensor]], **options: Any
) -> None:
    with ModelWriter(directory, module, **options) as writer:
        for name, parameter in parameters:
            writer.add(name, parameter)


def stored(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found = load_file(file)
        assert not tensors.keys() & found.keys()
        tensors |= found
    return tensors


def check_same_directory(written: Path, expected: Path) -> None:
    """Tensors by name, and the JSON files of the model."""
    found, saved = stored(written), stored(expected)
    assert found.keys() == saved.keys()
    for name, tensor in saved.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert sorted(path.name for path in written.glob("*.json")) == sorted(path.name for path in expected.glob("*.json"))
    for path in expected.glob("*config.json"):
        assert json.loads((written / path.name).read_text()) == json.loads(path.read_text())


@pytest.mark.parametrize("family", [*CUT_FAMILIES, *_EXPERTS])
def test_every_family_is_stored_as_transformers_stores_it(family: str, tmp_path: Path) -> None:
    module = make(family)
    module.save_pretrained(tmp_path / "expected", max_shard_size=20_000)
    write(module, tmp_path / "written", max_shard_bytes=20_000)
    check_same_directory(tmp_path / "written", tmp_path / "expected")
    index, expected = (
        json.loads((tmp_path / name / "model.safetensors.index.json").read_text()) for name in ("written", "expected")
    )
    assert index["metadata"] == expected["metadata"]
    assert index["weight_map"].keys() == expected["weight_map"].keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "written")
    for name, tensor in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_what_was_opened_without_its_weights_is_stored_again(tmp_path: Path) -> None:
    """Experts are stored one by one again, also where the module never held them."""
    for family in ("llama", "qwen3_moe"):
        make(family).save_pretrained(tmp_path / family)
        opened = open_causal_lm(resolve_model(str(tmp_path / family)), torch.float32)
        with ModelWriter(tmp_path / f"{family}-again", opened.module, max_shard_bytes=30_000) as writer:
            for name, parameter in opened.module.named_parameters():
                writer.add(name, opened.weights.read(name, 0, 0, parameter.shape[0]))
        opened.close()
        found, expected = stored(tmp_path / f"{family}-again"), stored(tmp_path / family)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_one_file_and_its_settings(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "old")
    module: Any = load_causal_lm(resolve_model(str(tmp_path / "old")), torch.float32)
    module.generation_config = GenerationConfig(eos_token_id=[2, 5], do_sample=True, temperature=0.7)
    before = module.config.to_dict()
    write(module, tmp_path / "new", dtype=torch.bfloat16)
    assert module.config.to_dict() == before
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])
    assert not any("attn_implementation" in key for key in config)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    generation = json.loads((tmp_path / "new" / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["temperature"]) == ([2, 5], 0.7)
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_a_reward_model(tmp_path: Path) -> None:
    save_tiny_reward_model(tmp_path / "old")
    module = AutoModelForSequenceClassification.from_pretrained(tmp_path / "old")
    write(module, tmp_path / "new", max_shard_bytes=40_000)
    loaded, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not info["missing_keys"]
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in module.state_dict().items())


def test_files_hold_what_fits_and_large_tensors_alone(tmp_path: Path) -> None:
    module = tiny_decoder("llama", attention="eager")
    largest = max(parameter.nbytes for parameter in module.parameters())
    write(module, tmp_path, max_shard_bytes=largest - 1)
    sizes = [[tensor.nbytes for tensor in load_file(file).values()] for file in tmp_path.glob("*.safetensors")]
    assert all(sum(file) < largest or len(file) == 1 for file in sizes)
    assert any(file == [largest] for file in sizes)


def test_a_tensor_is_copied_at_once_and_no_more_than_a_file_is_held(tmp_path: Path) -> None:
    module = tiny_decoder("llama", attention="eager")
    expected = {name: parameter.clone() for name, parameter in module.named_parameters()}
    with ModelWriter(tmp_path, module, max_shard_bytes=20_000) as writer:
        buffer = torch.empty(max(parameter.numel() for parameter in module.parameters()))
        for name, parameter in module.named_parameters():
            tensor = buffer[: parameter.numel()].view(parameter.shape)
            tensor.copy_(parameter.detach())
            writer.add(name, tensor)
            parameter.data = torch.empty(0)  # as sharded weights leave the module
            held = sum(tensor.nbytes for tensor in writer._shard.values())
            assert held <= 20_000
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.get_parameter(name), tensor) for name, tensor in expected.items())
    metadata = json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]
    assert metadata["total_parameters"] == sum(tensor.numel() for tensor in expected.values())


def test_a_smaller_save_leaves_nothing_of_a_larger_one(tmp_path: Path) -> None:
    module = tiny_decoder("llama", attention="eager")
    write(module, tmp_path, max_shard_bytes=10_000)
    (tmp_path / "README.md").write_text("stays")
    with torch.no_grad():
        module.get_parameter("model.norm.weight").add_(1)
    for options, num_files in (({"max_shard_bytes": 30_000}, 2), ({}, 1), ({"max_shard_bytes": 30_000}, 2)):
        write(module, tmp_path, **options)
        files = list(tmp_path.glob("*.safetensors"))
        assert len(files) >= num_files and (num_files == 1) == (len(files) == 1)
        assert (tmp_path / "model.safetensors.index.json").exists() == (num_files > 1)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(loaded.get_parameter("model.norm.weight"), module.get_parameter("model.norm.weight"))
    assert (tmp_path / "README.md").read_text() == "stays"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_a_save_that_fails_leaves_the_old_model(tmp_path: Path) -> None:
    module = tiny_decoder("llama", attention="eager")
    write(module, tmp_path)
    before = contents(tmp_path)
    with torch.no_grad():
        module.get_parameter("model.norm.weight").add_(1)
    names = [name for name, _ in module.named_parameters()]
    several = [(name, module.get_parameter(name)) for name in names[:9]]
    with pytest.raises(ValueError, match="has no parameter 'nothing'"):
        write_all(module, tmp_path, [*several, ("nothing", torch.zeros(1))], max_shard_bytes=10_000)
    assert contents(tmp_path) == before
    writer = ModelWriter(tmp_path, module)
    writer.add(names[0], module.get_parameter(names[0]))
    with pytest.raises(ValueError, match=rf"^{len(names) - 1} parameters were not added, .* the model is not saved"):
        writer.close()
    assert contents(tmp_path) == before
    assert not (tmp_path / ".model.partial").exists()
    ModelWriter(tmp_path, module)  # killed: its files stay until the next save
    write(module, tmp_path)
    assert not (tmp_path / ".model.partial").exists()


@pytest.mark.parametrize("max_shard_bytes", [10_000, 2**30])
def test_a_process_that_dies_while_files_are_exchanged_leaves_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_shard_bytes: int
) -> None:
    module = tiny_decoder("llama", attention="eager")
    save_tiny_llama(tmp_path)  # of other shapes
    left, replace = 3, Path.replace

    def die_later(path: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError("killed")
        return replace(path, target)

    monkeypatch.setattr(saving.Path, "replace", die_later)
    if max_shard_bytes > 10_000:
        left = 2  # the settings, and then the weights
    with pytest.raises(OSError, match="killed"):
        write(module, tmp_path, max_shard_bytes=max_shard_bytes)
    with pytest.raises(ValueError, match="the directory has no weights"):
        resolve_model(str(tmp_path))


def test_tied_and_mistaken_names(tmp_path: Path) -> None:
    module = tiny_decoder("llama", attention="eager", tie_word_embeddings=True)
    with ModelWriter(tmp_path, module) as writer:
        for name, parameter in module.named_parameters():
            if name != "model.embed_tokens.weight":
                writer.add(name, parameter)
        writer.add("lm_head.weight", module.get_parameter("lm_head.weight"))
        writer.add("model.embed_tokens.weight", module.get_parameter("model.embed_tokens.weight"))
        with pytest.raises(ValueError, match="model.norm.weight was added twice"):
            writer.add("model.norm.weight", module.get_parameter("model.norm.weight"))
        with pytest.raises(ValueError, match="LlamaForCausalLM has no parameter 'nothing'"):
            writer.add("nothing", torch.zeros(1))
    assert "model.embed_tokens.weight" in stored(tmp_path)
    assert "lm_head.weight" not in stored(tmp_path)


def test_settings_that_transformers_refuses_are_told_before_anything_is_gathered(tmp_path: Path) -> None:
    module: Any = tiny_decoder("llama", attention="eager")
    module.generation_config.temperature = 0.5  # without do_sample
    module.generation_config.num_beams = -1
    with pytest.raises(ValueError):
        ModelWriter(tmp_path, module)


def test_parameters_that_transformers_stores_jointly_are_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that split one stored tensor into several parameters joins them again, so all must be there."""
    from transformers.core_model_loading import Chunk, WeightConverter

    module = tiny_decoder("llama", attention="eager")
    split = WeightConverter("mlp.joint", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)])
    monkeypatch.setattr(module, "_weight_conversions", [split], raising=False)
    module.save_pretrained(tmp_path / "expected", max_shard_size=20_000)
    write(module, tmp_path / "written", max_shard_bytes=20_000)
    check_same_directory(tmp_path / "written", tmp_path / "expected")
    joint = stored(tmp_path / "written")["model.layers.0.mlp.joint"]
    parts = [module.get_parameter(f"model.layers.0.mlp.{name}_proj.weight") for name in ("gate", "up")]
    assert torch.equal(joint, torch.cat(parts))
