"""MeasuredShape: the shape of a model whose sizes were measured on its modules, rather than computed from config.json.

Pure, without torch. `models.on_transformers.measure` makes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_engine.models.shape import ExpertSizes, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredShare:
    """Sizes on one of `count` ranks that share each layer. Each size is the largest of any rank."""

    count: int
    layer_parameters: tuple[int, ...]  # weights of each layer
    embedding_parameters: int  # weights of the first of several stages, beside its layers
    final_parameters: int  # weights of the last of several stages, beside its layers
    both_parameters: int  # weights beside the layers, if one stage has all layers
    layer_kv_sizes: tuple[tuple[int, int], ...]  # (key/value heads, head size) of each layer's KV cache
    widest: int  # outputs of the widest linear layer, or of a token's experts together
    attention_size: int  # elements of the queries and keys of a token in the widest layer


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredShape(ModelShape):
    """Sizes of a model of the transformers backend. The fields of ModelShape describe its widest layer."""

    layer_parameters: tuple[int, ...]  # weights of each layer
    embedding_parameters: int  # weights of the first of several stages, beside its layers
    final_parameters: int  # weights of the last of several stages, beside its layers
    total_parameters: int  # weights of the model; a tied embedding and head count once
    active_parameters: int  # weights of the model without the experts that a token does not select
    measured_experts: ExpertSizes | None  # None: each layer has one MLP for all tokens
    layer_kv_sizes: tuple[tuple[int, int], ...]  # (key/value heads, head size) of each layer's KV cache
    widest: int  # outputs of the widest linear layer, or of a token's experts together
    can_be_staged: bool  # several stages can share the layers
    shares: tuple[MeasuredShare, ...] = ()  # for each number of ranks, above 1, that can share a layer
    unshared: str = ""  # if no number of ranks can share a layer: the reason
    # why `model_backend: auto` did not choose `native`, although `native` has the architecture; empty in other cases
    not_native: str = ""

    @property
    def num_layer_parameters(self) -> int:
        """Weights of an average layer."""
        return sum(self.layer_parameters) // self.num_layers

    @property
    def num_parameters(self) -> int:
        return self.total_parameters

    @property
    def num_active_parameters(self) -> int:
        return self.active_parameters

    @property
    def expert_sizes(self) -> ExpertSizes | None:
        return self.measured_experts

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Returns the bytes that one token takes in the KV cache, in all layers together."""
        elements = sum(num_kv_heads * head_dim for num_kv_heads, head_dim in self.layer_kv_sizes)
        return 2 * elements * element_bytes  # key and value

    @property
    def both_parameters(self) -> int:
        """Weights beside the layers, if one stage has all layers."""
        return self.total_parameters - sum(self.layer_parameters)

    def share(self, count: int) -> MeasuredShare:
        """Returns the sizes on one of `count` ranks that share each layer."""
        if count > 1:
            return next(share for share in self.shares if share.count == count)
        return MeasuredShare(
            count=1,
            layer_parameters=self.layer_parameters,
            embedding_parameters=self.embedding_parameters,
            final_parameters=self.final_parameters,
            both_parameters=self.both_parameters,
            layer_kv_sizes=self.layer_kv_sizes,
            widest=self.widest,
            attention_size=self.query_size + self.kv_size,
        )
