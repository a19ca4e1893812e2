"""What is free in a container, read from files as the kernel documents them (cgroup v2)."""

import math

import psutil
import pytest

from hybrid import host_memory

GIB = 1 << 30


def container(directory, limit, used, inactive):
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon {used - inactive}\ninactive_file {inactive}\nactive_file 0\n")
    return directory


@pytest.mark.parametrize(
    ("limit", "used", "inactive", "free"),
    [(8 * GIB, 3 * GIB, GIB, 6 * GIB), (8 * GIB, 9 * GIB, 0, 0), ("max", 3 * GIB, 0, math.inf)],
)
def test_what_a_container_has_left(tmp_path, limit, used, inactive, free):
    assert host_memory.free_in_container(container(tmp_path, limit, used, inactive)) == free


def test_without_a_container_the_machine_s_memory_counts(tmp_path):
    assert host_memory.free_in_container(tmp_path) == math.inf
    assert 0 < host_memory.free_bytes() <= psutil.virtual_memory().total
