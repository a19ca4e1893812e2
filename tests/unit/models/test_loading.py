"""Names become models, and mistakes in names become sentences, before any weight is read."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid.models import bundled, loading
from hybrid.models.attention import ATTENTION_NAME
from hybrid.models.empty import skeleton
from hybrid.models.hub import hub_is_reachable
from hybrid.models.loading import (
    load_causal_lm,
    load_tokenizer,
    load_value_model,
    resolve_dtype,
    resolve_model,
)
from tests.tiny import save_tiny_llama, save_tiny_reward_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def _forget_the_network() -> None:
    hub_is_reachable.cache_clear()


def message_of(name: str) -> str:
    with pytest.raises(ValueError) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_directory(tiny_llama: Path) -> None:
    resolved = resolve_model(str(tiny_llama))
    module = load_causal_lm(resolved, torch.float32)
    assert module.config._attn_implementation == ATTENTION_NAME
    assert not module.training
    ids = torch.randint(6, 262, (1, 12))
    expected = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(module(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert module.get_output_embeddings().weight is module.get_input_embeddings().weight


def test_buffers_keep_fp32(tiny_llama: Path) -> None:
    module = load_causal_lm(resolve_model(str(tiny_llama)), torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in module.buffers() if b.is_floating_point()} == {torch.float32}


def test_a_skeleton_has_shapes_and_no_storage(tiny_llama: Path) -> None:
    assert {p.device.type for p in skeleton(resolve_model(str(tiny_llama)).config).parameters()} == {"meta"}


def test_a_value_model_from_a_language_model_starts_at_zero(tiny_llama: Path) -> None:
    module = load_value_model(resolve_model(str(tiny_llama)), torch.float32)
    assert module(torch.tensor([[7, 8, 9]])).logits.tolist() == [[0.0]]
    language_model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert torch.equal(module.model.embed_tokens.weight, language_model.model.embed_tokens.weight)


def test_a_reward_model_keeps_its_head(tiny_reward_model: Path, tiny_llama: Path, tmp_path: Path) -> None:
    resolved = resolve_model(str(tiny_reward_model))
    assert load_value_model(resolved, torch.float32, new_head=False).score.weight.abs().sum() > 0
    with pytest.raises(ValueError, match="is LlamaForCausalLM, without a score head; a reward model is"):
        load_value_model(resolve_model(str(tiny_llama)), torch.float32, new_head=False)
    three = resolve_model(str(save_tiny_reward_model(tmp_path, num_labels=3)))
    with pytest.raises(ValueError, match="gives 3 scores; a value or reward model has num_labels=1"):
        load_value_model(three)


def test_a_checkpoint_that_lacks_weights_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    directory = tmp_path / "damaged"
    shutil.copytree(tiny_llama, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"lacks 9 of the model's weights, model.layers.2"):
        load_causal_lm(resolve_model(str(directory)))


def test_directories_that_are_no_models(tmp_path: Path, tiny_llama: Path) -> None:
    assert "there is no such directory" in message_of("./nowhere")
    assert "there is no such directory" in message_of(str(tmp_path / "nowhere"))
    assert "no config.json" in message_of(str(tmp_path))
    shutil.copy(tiny_llama / "config.json", tmp_path)
    assert "has no weights (model.safetensors); it holds config.json" in message_of(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text('{"model_type": "no-such-family"}')
    assert "its configuration cannot be read" in message_of(str(tmp_path))


def test_unknown_names_say_what_was_tried() -> None:
    text = message_of("lama-2-7b")
    assert "no directory, no alias and, without an owner/, no Hub id; did you mean llama-2-7b" in text
    assert "pass its directory" in text
    assert "aliases are llama-2-7b, " in message_of("zzz")
    assert "is empty" in message_of(" ")


def test_an_alias_is_a_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(loading, "_read_config", lambda label, source, **_: asked.append(source))
    assert resolve_model("llama-2-7b").source == "meta-llama/Llama-2-7b-hf"
    assert resolve_model("Qwen2.5-0.5B").source == "Qwen/Qwen2.5-0.5B"
    assert asked == ["meta-llama/Llama-2-7b-hf", "Qwen/Qwen2.5-0.5B"]


def test_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = message_of("llama-2-7b")
    assert "'llama-2-7b' (meta-llama/Llama-2-7b-hf): it is not in the local cache and HF_HUB_OFFLINE is set" in text
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub_is_reachable.cache_clear()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    assert "and the Hub cannot be reached. To use a local copy" in message_of("owner/model")


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (GatedRepoError, "it is gated; ask for access on its page, then run `hf auth login` or set HF_TOKEN"),
        (RepositoryNotFoundError, "the Hub has no such model, or it is private"),
    ],
)
def test_what_the_hub_refuses(monkeypatch: pytest.MonkeyPatch, cause: type[Exception], message: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("You are trying to access a gated repo") from cause.__new__(cause)

    monkeypatch.setattr(loading, "hub_is_reachable", lambda: True)
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", refuse)
    assert message in message_of("owner/model")


def test_a_tokenizer_without_pad_pads_with_eos_and_grows_nothing(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    tokenizer = tiny_tokenizer()
    size = len(tokenizer)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token is None
    loaded = load_tokenizer(resolve_model(str(tmp_path)))
    assert (loaded.pad_token_id, len(loaded)) == (loaded.eos_token_id, size)


def test_a_model_without_a_tokenizer_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_llama / name, tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer that can be loaded"):
        load_tokenizer(resolve_model(str(tmp_path)))


def test_dtypes() -> None:
    assert resolve_dtype("bf16") is torch.bfloat16
    assert resolve_dtype(torch.float16) is torch.float16
    assert resolve_dtype("auto", "cpu") in (torch.bfloat16, torch.float32)
    with pytest.raises(ValueError, match="choose auto, bf16, fp16 or fp32"):
        resolve_dtype("int8")  # pyright: ignore


def _convert_slowly(cache: str, record: str) -> None:
    import os
    import time

    os.environ["XDG_CACHE_HOME"] = cache

    def convert(gguf: Path, target: Path) -> None:
        with open(record, "a") as file:
            file.write("converted\n")
        time.sleep(0.5)
        (target / "config.json").write_text("{}")

    bundled._find_gguf = lambda: Path("model.gguf")
    bundled._convert = convert
    assert (bundled.bundled_path() or Path()) == Path(cache, "hybrid", "smollm2-135m-v1")


def test_ranks_that_race_convert_the_bundled_model_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    record = tmp_path / "record"
    ranks = [context.Process(target=_convert_slowly, args=(str(tmp_path), str(record))) for _ in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(30)
    assert [process.exitcode for process in ranks] == [0, 0, 0]
    assert record.read_text() == "converted\n"
    assert sorted(path.name for path in (tmp_path / "hybrid").iterdir()) == ["smollm2-135m-v1", "smollm2-135m-v1.lock"]


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gguf: Path, target: Path) -> None:
        (target / "half").touch()
        raise OSError("disk full")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bundled, "_find_gguf", lambda: Path("model.gguf"))
    monkeypatch.setattr(bundled, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        bundled.bundled_path()
    assert [path.name for path in (tmp_path / "hybrid").iterdir()] == ["smollm2-135m-v1.lock"]


def test_without_the_package_the_bundled_name_is_its_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bundled, "_find_gguf", lambda: None)
    monkeypatch.setattr(loading, "_read_config", lambda *_, **__: None)
    assert resolve_model("smollm2-135m").source == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_the_bundled_model_is_the_real_one(smollm2: Path) -> None:
    resolved = resolve_model("smollm2-135m")
    assert resolved.source == str(smollm2)
    assert not hasattr(resolved.config, "quantization_config")
    tokenizer = load_tokenizer(resolved)
    assert tokenizer.chat_template
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    module = load_causal_lm(resolved, torch.bfloat16)
    ids = torch.tensor([tokenizer.encode("The capital of France is")])
    with torch.no_grad():
        assert tokenizer.decode([int(module(ids).logits[0, -1].argmax())]) == " Paris"
