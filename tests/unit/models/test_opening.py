"""Models opened without reading them equal the models that transformers loads."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from hybrid.models import empty, loading
from hybrid.models.empty import skeleton
from hybrid.models.loading import (
    OpenedModel,
    load_causal_lm,
    load_value_model,
    open_causal_lm,
    open_value_model,
    resolve_model,
)
from hybrid.models.source import ModuleWeights, SafetensorsWeights
from tests.decoders import CUT_FAMILIES, tiny_decoder
from tests.distributed.world import run_world
from tests.tiny import save_tiny_llama, save_tiny_reward_model
from tests.unit.models.memory import give_back_freed_memory, resident_peak, start_peak

# Families with experts, which files hold one by one; with weights or buffers kept in fp32; with renamed weights.
_SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
_MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_MORE: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
    "deepseek_v3": {
        **_MLA,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "minimax": {"num_local_experts": 4, "head_dim": 8},
    "bloom": {},
    "mamba": {},
}


def make(family: str) -> PreTrainedModel:
    if family in CUT_FAMILIES:
        return tiny_decoder(family, attention="eager")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**_SHAPE, **_MORE[family]}))


def open_by_ranges(load: Any, directory: Path, *args: Any, **options: Any) -> OpenedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a model that is loaded whole warns
        return load(resolve_model(str(directory)), *args, **options)


def check_equal(opened: OpenedModel, loaded: PreTrainedModel) -> None:
    """Everything of the module, and every parameter by parts along each dimension."""
    found, expected = dict(opened.module.named_parameters()), dict(loaded.named_parameters())
    assert list(found) == list(expected)
    for name, weight in expected.items():
        assert (found[name].dtype, found[name].shape) == (weight.dtype, weight.shape), name
        assert found[name].is_meta and found[name].requires_grad
        for dim, size in enumerate(weight.shape):
            for start, stop in ((0, size // 3), (size // 3, size)):
                part = opened.weights.read(name, dim, start, stop)
                assert torch.equal(part.to(weight.dtype), weight.narrow(dim, start, stop - start)), name
    found, expected = dict(opened.module.named_buffers()), dict(loaded.named_buffers())
    assert list(found) == list(expected)
    for name, buffer in expected.items():
        assert (found[name].dtype, found[name].device) == (buffer.dtype, buffer.device), name
        assert torch.equal(found[name], buffer), name
    assert opened.module.config.to_dict() == loaded.config.to_dict()
    assert opened.module.config._attn_implementation == loaded.config._attn_implementation
    assert opened.module.config.name_or_path == loaded.config.name_or_path
    if loaded.can_generate():
        assert opened.module.generation_config.to_dict() == loaded.generation_config.to_dict()  # pyright: ignore
    assert not any(submodule.training for submodule in opened.module.modules())
    assert type(opened.module) is type(loaded)
    opened.close()


@pytest.mark.parametrize("family", [*CUT_FAMILIES, *_MORE])
def test_every_family_equals_what_transformers_loads(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some cannot run here, and have something for the reading of files that no other has.
    for module in (empty, loading):
        monkeypatch.setattr(module, "prepare", lambda _: None)
    module = make(family)
    torch.manual_seed(1)
    for name, buffer in module.named_buffers():
        if name in module.state_dict():
            buffer.normal_()
    module.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    opened = open_by_ranges(open_causal_lm, tmp_path, torch.bfloat16)
    check_equal(opened, load_causal_lm(resolve_model(str(tmp_path)), torch.bfloat16))


def test_a_tied_head_is_one_parameter(tiny_llama: Path) -> None:
    opened = open_by_ranges(open_causal_lm, tiny_llama, torch.float32)
    assert opened.module.get_output_embeddings().weight is opened.module.get_input_embeddings().weight
    assert "lm_head.weight" not in dict(opened.module.named_parameters())


def rewrite(directory: Path, change: Any) -> None:
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def test_a_checkpoint_that_holds_only_the_tied_head(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)

    def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {("lm_head.weight" if "embed_tokens" in name else name): tensor for name, tensor in tensors.items()}

    rewrite(tmp_path, rename)
    opened = open_by_ranges(open_causal_lm, tmp_path, torch.float32)
    check_equal(opened, load_causal_lm(resolve_model(str(tmp_path)), torch.float32))


def test_a_tied_head_that_is_stored_as_well(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    rewrite(tmp_path, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    check_equal(open_by_ranges(open_causal_lm, tmp_path), load_causal_lm(resolve_model(str(tmp_path))))
    rewrite(tmp_path, lambda tensors: {**tensors, "lm_head.weight": tensors["lm_head.weight"] + 1})
    with pytest.warns(UserWarning, match=r"is loaded whole on this rank: .* its files hold both, which differ"):
        opened = open_causal_lm(resolve_model(str(tmp_path)), torch.float32)
    expected = load_causal_lm(resolve_model(str(tmp_path)), torch.float32)  # transformers unties them
    assert torch.equal(opened.weights.read("lm_head.weight", 0, 0, 263), expected.lm_head.weight)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_checkpoint_of_the_body_alone(family: str, tmp_path: Path) -> None:
    tied = tiny_decoder(family, attention="eager", tie_word_embeddings=True)
    tied.base_model.save_pretrained(tmp_path)
    check_equal(open_by_ranges(open_causal_lm, tmp_path), load_causal_lm(resolve_model(str(tmp_path))))
    opened = open_by_ranges(open_value_model, tmp_path)
    check_equal(opened, load_value_model(resolve_model(str(tmp_path))))


def test_a_head_that_transformers_makes_up_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    tiny_decoder("llama", attention="eager", tie_word_embeddings=False).base_model.save_pretrained(tmp_path)
    heads = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with pytest.warns(UserWarning, match="loaded whole on this rank: it has no lm_head.weight, which transformers"):
            opened = open_causal_lm(resolve_model(str(tmp_path)))
        heads.append(opened.weights.read("lm_head.weight", 0, 0, 96))
    assert torch.equal(*heads)


def test_value_models(tiny_llama: Path, tiny_reward_model: Path, tmp_path: Path) -> None:
    for directory in (tiny_llama, tiny_reward_model):
        opened = open_by_ranges(open_value_model, directory, torch.bfloat16)
        check_equal(opened, load_value_model(resolve_model(str(directory)), torch.bfloat16))
    opened = open_by_ranges(open_value_model, tiny_reward_model, new_head=False)
    assert opened.weights.read("score.weight", 1, 0, 48).abs().sum() > 0
    with pytest.raises(ValueError, match="without a score head"):
        open_value_model(resolve_model(str(tiny_llama)), new_head=False)
    with pytest.raises(ValueError, match="gives 3 scores"):
        open_value_model(resolve_model(str(save_tiny_reward_model(tmp_path, num_labels=3))))


def set_config(directory: Path, **settings: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_a_checkpoint_that_lacks_weights_or_has_others(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    set_config(tmp_path, num_hidden_layers=3)
    for load in (open_causal_lm, open_value_model):
        with pytest.raises(ValueError, match=r"lacks 9 of the model's weights, model.layers.2"):
            load(resolve_model(str(tmp_path)))
    set_config(tmp_path, num_hidden_layers=1)  # what there is no place for is ignored
    check_equal(open_by_ranges(open_causal_lm, tmp_path), load_causal_lm(resolve_model(str(tmp_path))))
    set_config(tmp_path, intermediate_size=96)
    with pytest.raises(ValueError, match=r"down_proj.weight has shape \(48, 80\) and the model's \(48, 96\)"):
        open_causal_lm(resolve_model(str(tmp_path)))


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("experts.1.up_proj", "7 tensors that model.layers.0.mlp.experts.gate_up_proj is made of do not fit together"),
        ("experts.3.", r"experts.down_proj has shape \(3, 32, 16\) and the model's \(4, 32, 16\)"),
        ("experts.", "lacks 2 of the model's weights, model.layers.0.mlp.experts.down_proj first"),
    ],
)
def test_a_checkpoint_that_lacks_experts(tmp_path: Path, lost: str, message: str) -> None:
    make("qwen3_moe").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {name: tensors[name] for name in tensors if f"layers.0.mlp.{lost}" not in name})
    with pytest.raises(ValueError, match=message):
        open_causal_lm(resolve_model(str(tmp_path)))


def test_generation_settings(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    GenerationConfig(eos_token_id=[2, 5], temperature=0.5, do_sample=True).save_pretrained(tmp_path)
    for _ in range(2):
        opened = open_by_ranges(open_causal_lm, tmp_path)
        loaded: Any = load_causal_lm(resolve_model(str(tmp_path)))
        assert opened.module.generation_config.to_dict() == loaded.generation_config.to_dict()  # pyright: ignore
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
        set_config(tmp_path, temperature=0.7)  # where older checkpoints have them


def test_files_that_are_no_safetensors_are_loaded_whole(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    for load, name in ((open_causal_lm, "model.norm.weight"), (open_value_model, "score.weight")):
        with pytest.warns(UserWarning, match="loaded whole on this rank: its files are no safetensors"):
            opened = load(resolve_model(str(tmp_path)), torch.float32)
        assert isinstance(opened.weights, ModuleWeights)
        assert torch.equal(opened.weights.read(name, 0, 0, 1), opened.module.get_parameter(name)[:1])
        opened.close()
    assert opened.module.get_parameter("score.weight").eq(0).all()


def test_models_of_the_hub_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for name, options in (("model", {}), ("sharded", {"max_shard_size": "40KB"})):
        snapshot = tmp_path / f"models--owner--{name}" / "snapshots" / ("0" * 40)
        tiny_decoder("qwen2", attention="eager").save_pretrained(snapshot, **options)
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
        assert len(list(snapshot.glob("*.safetensors"))) == 1 or options
        opened = open_by_ranges(open_causal_lm, Path(f"owner/{name}"), torch.float32)
        check_equal(opened, load_causal_lm(resolve_model(f"owner/{name}"), torch.float32))
    single = tmp_path / "models--owner--model" / "snapshots" / ("0" * 40) / "model.safetensors"
    torch.save(load_file(single), snapshot / "pytorch_model.bin")
    for file in snapshot.glob("*.safetensors*"):
        file.unlink()
    with pytest.warns(UserWarning, match="its files are no safetensors"):
        open_causal_lm(resolve_model("owner/sharded"))


def test_files_can_go_away_after_they_are_read(tmp_path: Path) -> None:
    directory = save_tiny_llama(tmp_path / "model")
    opened = open_by_ranges(open_causal_lm, directory)
    assert isinstance(opened.weights, SafetensorsWeights)
    part = opened.weights.read("model.norm.weight", 0, 0, 3)
    expected = part.clone()
    opened.close()
    shutil.rmtree(directory)
    assert torch.equal(part, expected)


def _measure_shard(small: str, large: str) -> tuple[int, int, int]:
    """Bytes that a rank of four holds, of the largest tensor, and by which its resident memory grew at the peak."""
    give_back_freed_memory()
    peak_from = 0
    held, largest = [], 0
    for directory in (small, large):  # the small one has the code in memory, which counts
        held.clear()
        peak_from = start_peak()
        opened = open_causal_lm(resolve_model(directory), torch.float32)
        for name, parameter in opened.module.named_parameters():
            rows = parameter.shape[0] // 4
            held.append(torch.empty(rows, *parameter.shape[1:]))
            held[-1].copy_(opened.weights.read(name, 0, rows, 2 * rows))
            largest = max(largest, parameter.nbytes)
        opened.close()
    return sum(tensor.nbytes for tensor in held), largest, resident_peak() - peak_from


def test_a_rank_needs_the_memory_of_its_shard_and_a_tensor(tmp_path: Path) -> None:
    small = save_tiny_llama(tmp_path / "small")
    wide = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048, "head_dim": 64}
    large = save_tiny_llama(
        tmp_path / "large", num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8, **wide
    )
    ((held, largest, growth),) = run_world(_measure_shard, 1, tmp_path, str(small), str(large))
    assert (large / "model.safetensors").stat().st_size > 3.9 * held
    assert growth <= held + largest


def test_a_family_with_attention_of_its_own_is_refused_by_name(tmp_path):
    config = AutoConfig.for_model(
        "gpt_neo", vocab_size=96, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    resolved = resolve_model(str(tmp_path))
    for build in (open_causal_lm, load_causal_lm, lambda found: skeleton(found.config)):
        with pytest.raises(ValueError, match="gpt_neo has attention classes of its own .* choose another family"):
            build(resolved)
