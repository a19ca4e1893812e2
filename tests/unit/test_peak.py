"""What a device does at best: the data sheet of a GPU by its name, else what a large product takes."""

from __future__ import annotations

import time

import pytest
import torch

from hybrid.parallel import init_parallel
from hybrid.peak import data_sheet_flops


def test_the_peak_is_that_of_a_large_product() -> None:
    torch.set_num_threads(1)
    mesh = init_parallel(threads=1)
    state = torch.get_rng_state()
    peak = mesh.peak_flops(torch.float32)
    assert mesh.peak_flops(torch.float32) is peak and torch.equal(torch.get_rng_state(), state)
    matrix = torch.ones(512, 512)
    start = time.perf_counter()
    for _ in range(20):
        matrix @ matrix
    assert 1e8 < 20 * 2 * 512**3 / (time.perf_counter() - start) < 3 * peak


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        *(("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989)),
        *(("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA A10", 125), ("NVIDIA A10G", 70)),
        *(("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("Tesla V100-SXM2-16GB", 125), ("NVIDIA B200", 2250)),
        *(("NVIDIA GB200", 2500), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA GH200 480GB", 989)),
        *(("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 4090 D", None), ("a new one", None)),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ],
)
def test_the_peak_of_known_gpus_is_their_data_sheets(name: str, tflops: float | None) -> None:
    assert data_sheet_flops(name) == (None if tflops is None else tflops * 1e12)
