"""The ladder's arithmetic: shards tile slices, slices tile weights, nothing twice and nothing missing."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.layout import GroupLayout, ParamLayout, Segment, split_units


@st.composite
def param_layouts(draw, name="w"):
    axis = draw(st.sampled_from([None, 0, 1]))
    if axis is None:
        return ParamLayout(name=name, shape=tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3))))
    segments = []
    for _ in range(draw(st.integers(1, 3))):
        groups, units, unit = draw(st.integers(1, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
        segments.append(Segment(size=groups * units * unit, num_groups=groups, units_per_group=units))
    rows, other = sum(segment.size for segment in segments), draw(st.integers(1, 6))
    shape = (rows, other) if axis == 0 else (other, rows)
    return ParamLayout(name=name, shape=shape, axis=axis, segments=tuple(segments))


@given(st.integers(0, 50), st.integers(1, 9))
def test_units_are_split_evenly_and_whole(num_units, parts):
    bounds = split_units(num_units, parts)
    sizes = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    assert bounds[0] == 0 and bounds[-1] == num_units
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@given(param_layouts(), st.integers(1, 8))
def test_slices_tile_the_weight_along_units(layout, tp_size):
    num_slices = layout.num_slices(tp_size)
    assert tp_size % num_slices == 0
    held = []
    for index in range(num_slices):
        rows = layout.part_rows(index, num_slices)
        held += [row for start, stop in rows for row in range(start, stop)]
        numel = sum(stop - start for start, stop in rows) * layout.row_numel
        assert numel == layout.part_numel(index, num_slices) == math.prod(layout.part_shape(index, num_slices))
    assert sorted(held) == list(range(layout.storage_shape[0] if layout.shape else 1))
    if layout.axis is None:
        assert layout.segment_bounds(num_slices) == ((0, layout.numel),)
        return
    offset = 0
    for segment, bounds in zip(layout.segments, layout.segment_bounds(num_slices), strict=True):
        unit = segment.size // (segment.num_groups * segment.units_per_group) * layout.row_numel
        assert all((bound - offset) % unit == 0 for bound in bounds) and list(bounds) == sorted(bounds)
        offset += segment.size * layout.row_numel
        assert bounds[-1] == offset


@given(param_layouts(), st.integers(1, 8))
def test_every_tensor_rank_holds_what_its_share_of_the_groups_needs(layout, tp_size):
    """Groups of all segments go to the same ranks: a rank's query heads attend to the key/value heads it has."""
    if layout.axis is None:
        return
    for segment in layout.segments:
        covered = set()
        for rank in range(tp_size):
            start, stop = segment.part(rank, tp_size)
            assert 0 <= start <= stop <= segment.size
            covered |= set(range(start, stop))
            group = segment.size // segment.num_groups
            if tp_size > segment.num_groups:
                assert start // group == max(start, stop - 1) // group  # within one group
        assert covered == set(range(segment.size))


@given(st.lists(param_layouts(), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 4))
def test_shards_tile_the_slice(params, num_slices, num_pieces):
    params = tuple(p for p in params if p.num_slices(num_slices) == num_slices)
    if not params:
        return
    layout = GroupLayout(params=params, num_slices=num_slices, num_pieces=num_pieces)
    total = 0
    for index in range(num_slices):
        pieces = [layout.piece_range(index, d) for d in range(num_pieces)]
        assert pieces[0][0] == 0 and pieces[-1][1] == layout.slice_numel(index)
        assert all(a[1] == b[0] for a, b in zip(pieces, pieces[1:], strict=False))
        used = layout.slice_offsets(index)[-1]
        assert 0 <= layout.slice_numel(index) - used < num_pieces  # the padding is less than one element a piece
        assert layout.flip_numel(index) == layout.slice_numel(index) - layout.piece_numel(index)
        total += used
    assert total == sum(p.numel for p in params) == layout.full_offsets[-1]


@given(st.lists(param_layouts(), min_size=1, max_size=3), st.integers(1, 3), st.integers(1, 4))
def test_stretches_say_where_each_element_of_a_shard_comes_from(params, num_slices, num_pieces):
    params = [p for p in params if p.num_slices(num_slices) == num_slices]
    params = tuple(dataclasses.replace(p, name=f"w{i}") for i, p in enumerate(params))
    layout = GroupLayout(params=params, num_slices=num_slices, num_pieces=num_pieces)
    found = {p.name: [] for p in params}
    for index in range(num_slices):
        for piece in range(num_pieces):
            start, stop = layout.piece_range(index, piece)
            end = 0
            for stretch in layout.stretches(index, start, stop):
                assert stretch.start == end  # end to end; what is missing at the end is padding
                end += stretch.numel
                row_numel = next(p.row_numel for p in params if p.name == stretch.name)
                first = stretch.rows[0] * row_numel + stretch.skip
                assert first + stretch.numel <= stretch.rows[1] * row_numel < first + stretch.numel + row_numel
                found[stretch.name] += range(first, first + stretch.numel)
    for param in params:
        assert sorted(found[param.name]) == list(range(param.numel))


def test_three_kv_groups_over_two_ranks():
    heads = (Segment(size=576, num_groups=3, units_per_group=3),)
    query = ParamLayout(name="q", shape=(576, 576), axis=0, segments=heads)
    output = ParamLayout(name="o", shape=(576, 576), axis=1, segments=heads)
    assert [query.part_rows(t, 2) for t in range(2)] == [((0, 384),), ((384, 576),)]
    assert output.storage_shape == (576, 576) and output.part_shape(1, 2) == (192, 576)


def test_more_tensor_ranks_than_key_value_heads():
    query = ParamLayout(name="q", shape=(64, 32), axis=0, segments=(Segment(size=64, num_groups=2, units_per_group=4),))
    key = ParamLayout(name="k", shape=(16, 32), axis=0, segments=(Segment(size=16, num_groups=2),))
    assert query.num_slices(4) == 4 and key.num_slices(4) == 2
    assert [query.part_rows(t, 4)[0] for t in range(4)] == [(0, 16), (16, 32), (32, 48), (48, 64)]
    assert [key.part_rows(t, 4)[0] for t in range(4)] == [(0, 8), (0, 8), (8, 16), (8, 16)]
    assert key.num_slices(3) == 1  # ranks share heads unequally: it rests whole
    assert [key.part_rows(t, 3)[0] for t in range(3)] == [(0, 8), (0, 8), (8, 16)]
    assert [query.part_rows(t, 3)[0] for t in range(3)] == [(0, 16), (16, 32), (32, 64)]


def test_a_packed_weight_is_cut_in_each_segment():
    packed = ParamLayout(
        name="qkv",
        shape=(32, 8),
        axis=0,
        segments=(
            Segment(size=16, num_groups=2, units_per_group=2),
            Segment(size=8, num_groups=2),
            Segment(size=8, num_groups=2),
        ),
    )
    assert packed.part_rows(1, 2) == ((8, 16), (20, 24), (28, 32))
    assert packed.part_shape(1, 2) == (16, 8)
    assert packed.segment_bounds(2) == ((0, 64, 128), (128, 160, 192), (192, 224, 256))
    assert packed.num_slices(4) == 1  # its segments differ in how many slices they make


def test_a_flip_moves_one_slice_less_one_shard():
    weight = ParamLayout(name="w", shape=(64, 32), axis=0, segments=(Segment(size=64, num_groups=64),))
    for tp, dp in [(1, 4), (2, 2), (4, 1)]:
        layout = GroupLayout(params=(weight,), num_slices=tp, num_pieces=dp)
        assert layout.flip_numel(0) == weight.numel // tp - weight.numel // (tp * dp)


def test_what_does_not_add_up_is_refused():
    with pytest.raises(ValueError, match="10 rows do not divide into 3 groups of 1 units"):
        Segment(size=10, num_groups=3)
    with pytest.raises(ValueError, match=r"w: segments of \[8\] rows do not make up dimension 0 of shape \(10, 4\)"):
        ParamLayout(name="w", shape=(10, 4), axis=0, segments=(Segment(size=8, num_groups=2),))
    with pytest.raises(ValueError, match="axis 2"):
        ParamLayout(name="w", shape=(10, 4), axis=2)
