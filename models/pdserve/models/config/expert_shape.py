"""`ExpertShape`: the experts of DeepSeek V2 and V3 and of families that followed them."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.models.config.family_fields import words
from pdserve.models.json_object import JsonObject

GROUPED_EXPERT_FIELDS = words(
    "n_routed_experts num_local_experts n_shared_experts num_experts_per_tok moe_intermediate_size n_group topk_group "
    "norm_topk_prob routed_scaling_factor"
)
MAX_EXPERTS, MAX_EXPERT_SIZE = 1 << 14, 1 << 20


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Numbers and sizes of a layer's experts, and how a token gets its own."""

    num_experts: int
    """0, of defaults only: config.json must say it."""
    top_k: int
    """Experts per token; 0 as above."""
    size: int
    """Inner size I of an expert."""
    num_shared: int = 1
    """Experts that every token has, in one MLP of as many times the size; 0: none."""
    num_groups: int = 1
    """0 as above."""
    kept_groups: int = 1
    """Groups of experts from which a token has its own; 0 as above."""
    normalise: bool = True
    """True: the routing weights of a token add up to `scale`."""
    scale: float = 1.0
    """Factor of all routing weights."""

    def read(self, config: JsonObject, *, has_groups: bool = True) -> ExpertShape:
        """The numbers in config.json, with these as defaults. has_groups: False: one group, whatever config.json says of groups.

        Raises: ConfigError.
        """
        num_experts = config.integer("n_routed_experts", self.num_experts or None, maximum=MAX_EXPERTS)
        if config.integer("num_local_experts", num_experts) != num_experts:
            raise config.error("num_local_experts", f"n_routed_experts ({num_experts})")
        top_k = config.integer("num_experts_per_tok", self.top_k or None, maximum=num_experts)
        num_groups = config.integer("n_group", self.num_groups or None) if has_groups else 1
        kept_groups = config.integer("topk_group", self.kept_groups or None) if has_groups else 1
        if num_experts % num_groups:
            raise config.error("n_group", f"a divisor of n_routed_experts ({num_experts})")
        if kept_groups > num_groups:
            raise config.error("topk_group", f"at most n_group ({num_groups})")
        if top_k > kept_groups * (num_experts // num_groups):
            raise config.error("num_experts_per_tok", f"at most the experts of topk_group ({kept_groups}) groups")
        return ExpertShape(
            num_experts=num_experts,
            top_k=top_k,
            size=config.integer("moe_intermediate_size", self.size, maximum=MAX_EXPERT_SIZE),
            num_shared=config.integer("n_shared_experts", self.num_shared, minimum=0, maximum=MAX_EXPERTS),
            num_groups=num_groups,
            kept_groups=kept_groups,
            normalise=config.boolean("norm_topk_prob", self.normalise),
            scale=config.number("routed_scaling_factor", self.scale),
        )
