"""Recorded decode steps, with a recorder that runs the call again on the tensors it was recorded on, as a graph would.

Attention is Triton's, interpreted: it alone reads lengths from the tensors, like the kernels of a graph.
"""

from __future__ import annotations

import pytest
import torch

from hybrid.config import InferenceConfig
from hybrid.inference.generator import Generator
from hybrid.inference.params import SamplingParams
from hybrid.models.families import head_dim, num_kv_heads
from ops.attention import override_backend
from tests.decoders import tiny_decoder

pytest.importorskip("triton", reason="needs the triton package")


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


def make_generator(model, capture=None, **config):
    settings = {"block_size": 16, "max_num_seqs": 6, **config}
    return Generator(
        model,
        tokenizer=None,
        num_layers=model.config.num_hidden_layers,
        num_kv_heads=num_kv_heads(model.config),
        head_dim=head_dim(model.config),
        num_blocks=40,
        config=InferenceConfig(kv_blocks=40, **settings),
        eos_token_ids=[],
        dtype=torch.float32,
        device="cpu",
        weights_version=0,
        capture=capture,
    )


@torch.no_grad()
def test_recorded_steps_sample_what_others_do():
    """Batches that shrink from size to size, prompts that come in between, and a second call on the same recordings."""
    model = tiny_decoder("mistral", num_hidden_layers=1)  # with a window that contexts outgrow
    prompts = [list(range(3, 3 + length)) for length in (20, 3, 7, 1, 12, 5, 9)]
    params = [SamplingParams(max_tokens=6 + 2 * index, temperature=1.0) for index in range(len(prompts))]
    seeds = list(range(len(prompts)))
    recorder = Recorder()
    with override_backend("triton"):
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
def test_rows_that_stand_for_no_sequence_write_nothing():
    model = tiny_decoder("llama", num_hidden_layers=1)
    recorder = Recorder()
    with override_backend("triton"):
        generator = make_generator(model, recorder)
        cache = generator._runner.cache
        generator.generate([[5, 6, 7]] * 3, [SamplingParams(max_tokens=10, temperature=1.0)] * 3, [0, 1, 2])
    assert recorder.num_launched
    used = cache.key.abs().sum((0, 3, 4)).flatten().count_nonzero()
    # The prompt once, and of each of three samples all new tokens but the last; the shared tail was copied twice.
    assert used <= 3 * (3 + 9)
    generator.check()
