"""Recorded decode steps: as a graph would run them, and as tapes do.

A recorder stands for graphs that runs the call again on the tensors it was recorded on. Attention is then Triton's,
interpreted: like the kernels of a graph it reads lengths from the tensors.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from hybrid.config import InferenceConfig
from hybrid.inference.generator import Generator
from hybrid.inference.params import SamplingParams
from hybrid.models.families import head_dim, num_kv_heads
from ops import attention_cpu, tape
from ops.attention import override_backend
from tests.decoders import tiny_decoder

NEEDS_KERNELS = pytest.mark.skipif(not attention_cpu.is_available(), reason="needs a C++ compiler")


@pytest.fixture
def triton_attention():
    pytest.importorskip("triton", reason="needs the triton package")
    with override_backend("triton"):
        yield


class Recorder:
    def __init__(self):
        self.num_recorded = self.num_launched = 0

    def __call__(self, compute):
        recorded = compute()
        self.num_recorded += 1
        addresses = recorded.data_ptr()

        def launch():
            self.num_launched += 1
            assert recorded.data_ptr() == addresses
            return recorded.copy_(compute())  # a graph overwrites what the recorded call returned

        return launch


def make_generator(model, capture=None, *, dtype=torch.float32, num_blocks=40, **config):
    settings = {"block_size": 16, "max_num_seqs": 6, **config}
    return Generator(
        model,
        tokenizer=None,
        num_layers=model.config.num_hidden_layers,
        num_kv_heads=num_kv_heads(model.config),
        head_dim=head_dim(model.config),
        num_blocks=num_blocks,
        config=InferenceConfig(kv_blocks=num_blocks, **settings),
        eos_token_ids=[],
        dtype=dtype,
        device="cpu",
        weights_version=0,
        capture=capture,
    )


@torch.no_grad()
@pytest.mark.usefixtures("triton_attention")
def test_recorded_steps_sample_what_others_do():
    """Batches that shrink from size to size, prompts that come in between, and a second call on the same recordings."""
    model = tiny_decoder("mistral", num_hidden_layers=1)  # with a window that contexts outgrow
    prompts = [list(range(3, 3 + length)) for length in (20, 3, 7, 1, 12, 5, 9)]
    params = [SamplingParams(max_tokens=6 + 2 * index, temperature=1.0) for index in range(len(prompts))]
    seeds = list(range(len(prompts)))
    recorder = Recorder()
    recording = make_generator(model, recorder)
    recorded = [recording.generate(prompts, params, seeds) for _ in range(2)]
    recording.check()
    assert recorder.num_recorded >= 3
    assert recorder.num_launched > 2 * recorder.num_recorded
    with override_backend("reference"):
        expected = make_generator(model).generate(prompts, params, seeds)
    for completions in recorded:
        assert [each.token_ids for each in completions] == [each.token_ids for each in expected]
        for one, other in zip(completions, expected, strict=True):
            torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.usefixtures("triton_attention")
def test_rows_that_stand_for_no_sequence_write_nothing():
    model = tiny_decoder("llama", num_hidden_layers=1)
    recorder = Recorder()
    generator = make_generator(model, recorder)
    cache = generator._runner.cache
    generator.generate([[5, 6, 7]] * 3, [SamplingParams(max_tokens=10, temperature=1.0)] * 3, [0, 1, 2])
    assert recorder.num_launched
    used = cache.key.abs().sum((0, 3, 4)).flatten().count_nonzero()
    # The prompt once, and of each of three samples all new tokens but the last; the shared tail was copied twice.
    assert used <= 3 * (3 + 9)
    generator.check()


class TapeRecorder:
    """`tape.record`, counting what becomes of its recordings."""

    def __init__(self, distort=lambda logits: logits):
        self.num_recorded = self.num_launched = self.num_refused = 0
        self.distort = distort

    def __call__(self, compute):
        try:
            launch_tape = tape.record(compute)
        except tape.NotRecordable:
            self.num_refused += 1
            raise
        self.num_recorded += 1

        def launch():
            self.num_launched += 1
            return self.distort(launch_tape())

        return launch


@pytest.fixture
def requests():
    """Of lengths that make batches shrink through three sizes, of which two are recorded."""
    prompts = [list(range(3, 4 + index % 7)) for index in range(35)]
    params = [SamplingParams(max_tokens=6 + index, temperature=1.0) for index in range(35)]
    return prompts, params, list(range(35))


def have_same_bits(found, expected):
    return all(torch.equal(one.logprobs, other.logprobs) for one, other in zip(found, expected, strict=True))


@NEEDS_KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral"])
@torch.no_grad()
def test_steps_on_tape_have_the_bits_of_others(requests, family, dtype):
    model = tiny_decoder(family, num_hidden_layers=2).to(dtype)
    settings = {"max_num_seqs": 64, "dtype": dtype, "num_blocks": 200}
    expected = make_generator(model, **settings).generate(*requests)
    recorder = TapeRecorder()
    generator = make_generator(model, recorder, **settings)
    for _ in range(2):  # the second time on the same recordings
        found = generator.generate(*requests)
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]
        assert have_same_bits(found, expected)
    generator.check()
    assert recorder.num_recorded >= 2
    assert recorder.num_launched > 20


@NEEDS_KERNELS
@torch.no_grad()
def test_a_model_that_goes_by_numbers_is_not_recorded(requests):
    model = tiny_decoder("mixtral", num_hidden_layers=1)  # which experts have tokens decides what it computes
    settings = {"max_num_seqs": 64, "num_blocks": 200}
    expected = make_generator(model, **settings).generate(*requests)
    recorder = TapeRecorder()
    found = make_generator(model, recorder, **settings).generate(*requests)
    assert (recorder.num_refused, recorder.num_recorded) == (1, 0)
    assert have_same_bits(found, expected)


@NEEDS_KERNELS
@torch.no_grad()
def test_a_recording_that_gives_other_bits_is_not_used(requests):
    model = tiny_decoder("llama", num_hidden_layers=1)
    settings = {"max_num_seqs": 64, "num_blocks": 200}
    expected = make_generator(model, **settings).generate(*requests)
    recorder = TapeRecorder(distort=lambda logits: logits + 1e-3 * torch.randn_like(logits))
    found = make_generator(model, recorder, **settings).generate(*requests)
    assert (recorder.num_recorded, recorder.num_launched) == (1, 1)
    assert have_same_bits(found, expected)


class GoesByPositions(torch.nn.Module):
    """A model that takes a branch by numbers which torch does not see it read."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids, position_ids, **options):
        ids = input_ids if not position_ids.numpy().any() else input_ids.roll(1)
        return self.model(input_ids=ids, position_ids=position_ids, **options)


@NEEDS_KERNELS
@torch.no_grad()
def test_a_branch_that_no_recorder_sees_is_found(requests):
    model = GoesByPositions(tiny_decoder("llama", num_hidden_layers=1))
    settings = {"max_num_seqs": 64, "num_blocks": 200}
    expected = make_generator(model, **settings).generate(*requests)
    recorder = TapeRecorder()
    found = make_generator(model, recorder, **settings).generate(*requests)
    assert (recorder.num_recorded, recorder.num_launched) == (1, 1)
    assert have_same_bits(found, expected)


@NEEDS_KERNELS
@torch.no_grad()
def test_recordings_go_with_their_generator(requests):
    """A KV pool that outlived the flip would be there twice."""
    generator = make_generator(
        tiny_decoder("llama", num_hidden_layers=1), TapeRecorder(), max_num_seqs=64, num_blocks=200
    )
    generator.generate(*requests)
    pool = weakref.ref(generator._runner.cache.key)
    gc.collect()
    gc.disable()
    try:
        del generator
        assert pool() is None
    finally:
        gc.enable()
