"""How tensor parallelism cuts a model: every parameter's layout, and the modules that need help to work on slices.

What is laid out is a causal language model whose layers' projections have known roles (see `families`). Modules on
slices need a collective (partial sums, partial vocabularies, norms over all heads), or this rank's numbers in place of
the model's (`ModelPlan.attributes`). What cannot be cut is refused here, by name, before any weight moves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hybrid.layout import ParamLayout, Segment
from hybrid.models.families import HEAD_COUNTS, Count, Family, Role, family_of, head_dim, num_kv_heads

_HEAD_NORM = re.compile(r"(q|k|query|key)_?(layer)?_?norm")
EPSILONS = ("variance_epsilon", "eps")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """Layouts by parameter name, and what the modules of a sliced model need besides."""

    params: Mapping[str, ParamLayout]
    # Modules whose output is a partial sum, or this rank's rows or columns of the vocabulary.
    row_parallel: tuple[str, ...] = ()
    embedding: str | None = None
    lm_head: str | None = None
    # Biases of row-parallel modules: one rank of a tensor group adds them, or the sum would hold them T times.
    row_biases: frozenset[str] = field(default_factory=frozenset)
    # RMS norms over heads that several ranks hold, and the attribute that is each one's epsilon.
    norms: Mapping[str, str] = field(default_factory=dict)
    # Attributes that count what is cut, by module and name, with a number for each tensor rank. A name that starts
    # with "config." is one of the module's configuration, which it shares with others.
    attributes: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    # Key/value heads of each tensor rank's cache; replicated ones count on every rank that has them.
    kv_heads: tuple[int, ...] = ()

    def num_local_kv_heads(self, tp_rank: int) -> int:
        """Key/value heads that a tensor rank's KV cache holds, in every layer."""
        return self.kv_heads[tp_rank]


def whole_plan(module: nn.Module) -> ModelPlan:
    """The plan of a model that is never sliced: a tensor group of one, or a model without a generation mode."""
    return ModelPlan(
        params={name: ParamLayout(name=name, shape=tuple(p.shape)) for name, p in module.named_parameters()}
    )


def tensor_parallel_plan(module: PreTrainedModel, tp_size: int) -> ModelPlan:
    """Lay a causal language model out for ``tp_size`` tensor ranks.

    Raises:
        ValueError: the family cannot be laid out, or has fewer query heads, neurons or tokens than there are ranks.
            Nothing is refused for one rank.
    """
    config = module.config.get_text_config(decoder=True)
    if tp_size == 1:
        num_heads = num_kv_heads(config) if hasattr(config, "num_attention_heads") else 0
        return replace(whole_plan(module), kv_heads=(num_heads,))
    return _Planner(module, config, tp_size).plan()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heads:
    """The attention heads of every layer, in ``num_groups`` groups that ranks share out."""

    query: int
    key_value: int
    head_dim: int
    num_groups: int

    def query_segment(self, size: int) -> Segment:
        """Rows of all query heads: a group's are divided between the ranks that share it."""
        shared = self.query // self.key_value if self.num_groups == self.key_value else 1
        return Segment(size=size, num_groups=self.num_groups, units_per_group=shared)

    def kv_segment(self, size: int) -> Segment:
        """Rows of all key/value heads, or of whole groups: ranks that share one hold it all."""
        return Segment(size=size, num_groups=self.num_groups)

    def segments(self, role: Role, size: int) -> tuple[Segment, ...]:
        """A projection's rows, or columns."""
        if role in (Role.UP, Role.DOWN):
            return (Segment(size=size, num_groups=size),)
        if role is Role.GATE_UP:
            return (Segment(size=size // 2, num_groups=size // 2),) * 2
        if role in (Role.QUERY, Role.OUTPUT):
            return (self.query_segment(size),)
        if role is Role.QKV:
            key = self.kv_segment(self.key_value * self.head_dim)
            return (self.query_segment(self.query * self.head_dim), key, key)
        return (self.kv_segment(size),)

    def count(self, count: Count, tp_rank: int = 0, tp_size: int = 1) -> int:
        """The number a tensor rank has of something; the model's, for one rank."""
        query = _length(self.query_segment(self.query), tp_rank, tp_size)
        key_value = _length(self.kv_segment(self.key_value), tp_rank, tp_size)
        return {
            Count.QUERY_HEADS: query,
            Count.KV_HEADS: key_value,
            Count.QUERIES_PER_KV_HEAD: query // key_value,
            Count.QUERY_WIDTH: query * self.head_dim,
            Count.KV_WIDTH: key_value * self.head_dim,
        }[count]


def _length(segment: Segment, index: int, num_parts: int) -> int:
    start, stop = segment.part(index, num_parts)
    return stop - start


class _Planner:
    """Lays one model out for ``tp_size`` > 1 ranks."""

    def __init__(self, module: PreTrainedModel, config: PreTrainedConfig, tp_size: int) -> None:
        self.kind, self.tp_size = config.model_type, tp_size
        self.modules: dict[str, nn.Module] = dict(module.named_modules())
        self.parameters = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self.embedding, self.lm_head = self._vocabulary_modules(module)
        family = family_of(config, tp_size)
        self.roles = self._roles_by_module(module, family)
        self.attentions = sorted({name.rpartition(".")[0] for name, role in self.roles.items() if role is Role.OUTPUT})
        self.heads = self._heads(config, family)
        self.counts = {**HEAD_COUNTS, **family.counts}

    def plan(self) -> ModelPlan:
        params = {name: ParamLayout(name=name, shape=shape) for name, shape in self.parameters.items()}
        params |= self._vocabulary_layouts()
        row_biases = []
        for name, role in self.roles.items():
            layouts = self._projection_layouts(name, role)
            params |= layouts
            bias = f"{name}.bias"
            if bias in self.parameters and bias not in layouts:
                row_biases.append(bias)
        norms: dict[str, str] = {}
        for attention in self.attentions:
            for name, epsilon in self._cut_beside_heads(attention, params).items():
                if epsilon is not None:
                    norms[name] = epsilon
        return ModelPlan(
            params=params,
            row_parallel=tuple(sorted(name for name, role in self.roles.items() if role.is_row_parallel)),
            embedding=self.embedding,
            lm_head=self.lm_head,
            row_biases=frozenset(row_biases),
            norms=norms,
            attributes=self._attributes(params),
            kv_heads=tuple(self.heads.count(Count.KV_HEADS, rank, self.tp_size) for rank in range(self.tp_size)),
        )

    # -- what there is -------------------------------------------------------------------------------------------

    def _vocabulary_modules(self, module: PreTrainedModel) -> tuple[str | None, str | None]:
        """Names of the input embedding and of the LM head."""
        names = {id(child): name for name, child in self.modules.items()}
        return names.get(id(module.get_input_embeddings())), names.get(id(module.get_output_embeddings()))

    def _roles_by_module(self, module: PreTrainedModel, family: Family) -> dict[str, Role]:
        prefix = f"{module.base_model_prefix}." if module.base_model is not module else ""
        patterns = [
            (re.compile(re.escape(prefix + pattern).replace(r"\*", r"\d+")), role)
            for pattern, role in family.roles.items()
        ]
        roles: dict[str, Role] = {}
        for name, child in self.modules.items():
            role = next((role for regex, role in patterns if regex.fullmatch(name)), None)
            if role is None or name in (self.embedding, self.lm_head):
                continue
            if not isinstance(child, (nn.Linear, Conv1D)) or f"{name}.weight" not in self.parameters:
                raise self._refusal(f"{name} is a {type(child).__name__}, which cannot be laid out")
            roles[name] = role
        if Role.OUTPUT not in roles.values():
            raise self._refusal("the tensor-parallel plan matches none of its row-parallel modules")
        return roles

    def _heads(self, config: PreTrainedConfig, family: Family) -> _Heads:
        query, key_value = config.num_attention_heads, num_kv_heads(config)
        if query % key_value:
            raise self._refusal(f"{query} query heads are not shared out evenly over {key_value} key/value heads")
        num_groups, what = key_value, f"the {query} query heads"
        if family.blocks_attribute is not None:
            num_groups = getattr(self.modules[self.attentions[0]], family.blocks_attribute, 0)
            what = f"the {num_groups} blocks of heads"
            if not num_groups or key_value % num_groups:
                raise self._refusal(f"{key_value} heads do not lie in {num_groups} whole blocks")
        limit = query if num_groups == key_value else num_groups
        self._require_enough(limit, what)
        return _Heads(query=query, key_value=key_value, head_dim=head_dim(config), num_groups=num_groups)

    # -- layouts -------------------------------------------------------------------------------------------------

    def _vocabulary_layouts(self) -> dict[str, ParamLayout]:
        layouts = {}
        for name, shape in self.parameters.items():
            if name.rpartition(".")[0] in (self.embedding, self.lm_head):
                self._require_enough(shape[0], f"the {shape[0]} rows of {name}")
                rows = Segment(size=shape[0], num_groups=shape[0])
                layouts[name] = ParamLayout(name=name, shape=shape, axis=0, segments=(rows,))
        return layouts

    def _projection_layouts(self, name: str, role: Role) -> dict[str, ParamLayout]:
        """Layouts of a projection's weight and of its bias, which is cut only if the output is."""
        weight, bias = f"{name}.weight", f"{name}.bias"
        # Conv1D keeps its weight as (in, out).
        output_axis = 1 if isinstance(self.modules[name], Conv1D) else 0
        axis = 1 - output_axis if role.is_row_parallel else output_axis
        shape = self.parameters[weight]
        size = shape[axis]
        self._check_rows(name, role, size)
        segments = self.heads.segments(role, size)
        layouts = {weight: ParamLayout(name=weight, shape=shape, axis=axis, segments=segments)}
        if bias in self.parameters and not role.is_row_parallel:
            layouts[bias] = ParamLayout(name=bias, shape=self.parameters[bias], axis=0, segments=segments)
        return layouts

    def _check_rows(self, name: str, role: Role, size: int) -> None:
        """Raise unless a projection has as many rows (OUTPUT and DOWN: columns) as its role says."""
        heads = self.heads
        queries, keys = heads.query * heads.head_dim, heads.key_value * heads.head_dim
        expected = {
            Role.QUERY: queries,
            Role.OUTPUT: queries,
            Role.KEY_VALUE: keys,
            Role.QKV: queries + 2 * keys,
            Role.QKV_BY_HEAD: 3 * keys,
        }.get(role)
        if expected is None:
            neurons = size // 2 if role is Role.GATE_UP else size
            self._require_enough(neurons, f"the {neurons} neurons of {name}")
        elif size != expected:
            raise self._refusal(
                f"{name} has {size} rows, and {heads.query} query and {heads.key_value} key/value heads of "
                f"{heads.head_dim} elements make {expected}"
            )

    def _cut_beside_heads(self, attention: str, params: dict[str, ParamLayout]) -> dict[str, str | None]:
        """Lay out what an attention module has besides its projections: norms of queries and keys.

        Returns:
            the norms that are cut, and the attribute that is their epsilon if they are norms over all heads.
        """
        cut: dict[str, str | None] = {}
        heads = self.heads
        for name, shape in self.parameters.items():
            owner = name.rpartition(".")[0]
            if owner in self.roles or not f"{owner}.".startswith(f"{attention}."):
                continue
            if not _HEAD_NORM.fullmatch(owner[len(attention) + 1 :]):
                raise self._unknown(name, shape)
            if shape == (heads.head_dim,):
                continue  # each head by itself, all alike
            query, key = heads.query, heads.key_value
            by_size = {query * heads.head_dim: heads.query_segment, key * heads.head_dim: heads.kv_segment}
            by_rows = {query: heads.query_segment, key: heads.kv_segment}
            if len(shape) == 1 and shape[0] in by_size:
                segment, cut[owner] = by_size[shape[0]](shape[0]), self._epsilon(owner)
            elif len(shape) == 2 and shape[1] == heads.head_dim and shape[0] in by_rows:
                segment, cut[owner] = by_rows[shape[0]](shape[0]), None  # each head by itself, with its own weights
            else:
                raise self._unknown(name, shape)
            params[name] = ParamLayout(name=name, shape=shape, axis=0, segments=(segment,))
        return cut

    def _epsilon(self, name: str) -> str:
        """The attribute that is a norm's epsilon, through which the squares of other ranks enter."""
        norm = self.modules[name]
        attribute = next((epsilon for epsilon in EPSILONS if isinstance(getattr(norm, epsilon, None), float)), None)
        # torch's own norms take a plain number only, and a norm that subtracts the mean needs other ranks' sums too.
        if attribute is None or "RMSNorm" not in type(norm).__name__ or isinstance(norm, nn.RMSNorm):
            raise self._refusal(f"{name} ({type(norm).__name__}) runs over all heads and is not an RMS norm")
        return attribute

    def _attributes(self, params: Mapping[str, ParamLayout]) -> dict[str, dict[str, tuple[int, ...]]]:
        attributes: dict[str, dict[str, tuple[int, ...]]] = {}
        for name in self.attentions:
            for attribute, count in self.counts.items():
                value = reduce(lambda owner, part: getattr(owner, part, None), attribute.split("."), self.modules[name])
                if value is None:
                    continue
                if value != self.heads.count(count):
                    raise self._refusal(
                        f"{name}.{attribute} is {value}, not the {self.heads.count(count)} {count.value}"
                    )
                attributes.setdefault(name, {})[attribute] = tuple(
                    self.heads.count(count, rank, self.tp_size) for rank in range(self.tp_size)
                )
        for name, role in self.roles.items():
            if isinstance(self.modules[name], Conv1D) and not role.is_row_parallel:
                weight = params[f"{name}.weight"]
                attributes[name] = {
                    "nf": tuple(weight.part_shape(rank, self.tp_size)[0] for rank in range(self.tp_size))
                }
        return attributes

    # -- refusals ------------------------------------------------------------------------------------------------

    def _require_enough(self, limit: int, what: str) -> None:
        if limit < self.tp_size:
            raise ValueError(
                f"tp_size {self.tp_size} is more than {what} of {self.kind}; set --tp_size to at most {limit}"
            )

    def _unknown(self, name: str, shape: tuple[int, ...]) -> ValueError:
        return self._refusal(
            f"{name} of shape {shape} lies beside heads that are cut, and it is not known which of them it belongs to"
        )

    def _refusal(self, why: str) -> ValueError:
        return ValueError(f"{self.kind}: {why}, so it cannot be cut over {self.tp_size} ranks; set --tp_size 1")
