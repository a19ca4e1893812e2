"""The ladder's arithmetic: shards tile slices, slices tile weights, nothing twice and nothing missing."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.layout import GroupLayout, ParamLayout, split_units


@st.composite
def param_layouts(draw, name="w"):
    axis = draw(st.sampled_from([None, 0, 1]))
    units, unit, other = draw(st.integers(1, 7)), draw(st.integers(1, 5)), draw(st.integers(1, 6))
    if axis is None:
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
        return ParamLayout(name=name, shape=shape)
    shape = (units * unit, other) if axis == 0 else (other, units * unit)
    return ParamLayout(name=name, shape=shape, axis=axis, num_units=units)


@given(st.integers(0, 50), st.integers(1, 9))
def test_units_are_split_evenly_and_whole(num_units, parts):
    bounds = split_units(num_units, parts)
    sizes = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    assert bounds[0] == 0 and bounds[-1] == num_units
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@given(param_layouts(), st.integers(1, 8))
def test_slices_tile_the_weight_along_units(layout, tp_size):
    if layout.axis is None:
        assert layout.slice_range(0, tp_size) == (0, layout.numel)
        return
    ranges = [layout.slice_range(t, tp_size) for t in range(tp_size)]
    assert ranges[0][0] == 0 and ranges[-1][1] == layout.numel
    assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:], strict=False))
    unit = layout.shape[layout.axis] // layout.num_units
    for t, (start, stop) in enumerate(ranges):
        rows = layout.rows(t, tp_size)
        assert rows[0] % unit == 0 and rows[1] % unit == 0
        assert stop - start == math.prod(layout.slice_shape(t, tp_size))


@given(st.lists(param_layouts(), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 4))
def test_shards_tile_the_slice(params, num_slices, num_pieces):
    params = tuple(p for p in params if p.axis is not None) if num_slices > 1 else tuple(params)
    if not params:
        return
    layout = GroupLayout(params=params, num_slices=num_slices, num_pieces=num_pieces)
    total = 0
    for t in range(num_slices):
        pieces = [layout.piece_range(t, d) for d in range(num_pieces)]
        assert pieces[0][0] == 0 and pieces[-1][1] == layout.slice_numel(t)
        assert all(a[1] == b[0] for a, b in zip(pieces, pieces[1:], strict=False))
        used = layout.slice_offsets(t)[-1]
        assert 0 <= layout.slice_numel(t) - used < num_pieces  # the padding is less than one element a piece
        assert layout.flip_numel(t) == layout.slice_numel(t) - layout.piece_numel(t)
        total += used
    assert total == sum(p.numel for p in params) == layout.full_offsets[-1]


def test_three_kv_groups_over_two_ranks():
    query = ParamLayout(name="q", shape=(576, 576), axis=0, num_units=3)
    output = ParamLayout(name="o", shape=(576, 576), axis=1, num_units=3)
    assert [query.rows(t, 2) for t in range(2)] == [(0, 384), (384, 576)]
    assert output.storage_shape == (576, 576) and output.slice_shape(1, 2) == (192, 576)


def test_a_flip_moves_one_slice_less_one_shard():
    weight = ParamLayout(name="w", shape=(64, 32), axis=0, num_units=64)
    for tp, dp in [(1, 4), (2, 2), (4, 1)]:
        layout = GroupLayout(params=(weight,), num_slices=tp, num_pieces=dp)
        assert layout.flip_numel(0) == weight.numel // tp - weight.numel // (tp * dp)


def test_units_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"w: dimension 0 of shape \(10, 4\) does not divide into 3 units"):
        ParamLayout(name="w", shape=(10, 4), axis=0, num_units=3)
    with pytest.raises(ValueError, match="axis 2"):
        ParamLayout(name="w", shape=(10, 4), axis=2)
