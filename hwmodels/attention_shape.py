"""The attention of a transformer: its weights, its KV cache, and how much of that a token reads.

Layers are of up to three kinds: *full* attention, *window* attention (a token sees the last
``window_tokens`` only) and *linear* attention (a state of fixed size in place of keys and values, as
gated delta nets have). What is asked for one layer is then the mean over all layers, rounded up, for no
one says which layer is of which kind.
"""

from __future__ import annotations

from dataclasses import dataclass

from hwmodels.fields import Rule
from hwmodels.units import weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The part of a model's shape that its attention needs.

    With latent attention (MLA) ``kv_lora_rank`` is > 0, ``head_dim`` is the part of a head without rotary
    embedding, ``num_kv_heads`` plays no part, and the KV cache holds the compressed latents. Of
    ``num_layers`` layers ``num_linear_layers`` have linear attention of ``linear_params`` weights and
    ``linear_state_bytes`` of state a sequence; ``num_window_layers`` more see ``window_tokens`` tokens.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    """Size of a value head; 0: as ``head_dim``."""
    attention_gate: bool = False
    """A gate on the output makes the query projection twice as wide."""
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    num_linear_layers: int = 0
    linear_params: int = 0
    linear_state_bytes: int = 0
    num_window_layers: int = 0
    window_tokens: int = 0
    kv_bits: float

    def attention_rules(self) -> list[Rule]:
        """Return what these fields demand of each other."""
        heads, layers = self.num_attention_heads, self.num_layers
        linear, windows = self.num_linear_layers, self.num_window_layers
        is_latent = self.kv_lora_rank > 0
        return [
            (
                "num_kv_heads",
                is_latent or heads % self.num_kv_heads == 0,
                f"must divide num_attention_heads = {heads}",
            ),
            ("kv_bits", self.kv_bits <= 32, "must be <= 32"),
            (
                "qk_rope_head_dim",
                is_latent == (self.qk_rope_head_dim > 0),
                "must be > 0 with latent attention (kv_lora_rank > 0), else 0",
            ),
            ("num_linear_layers", linear <= layers, f"must be <= num_layers = {layers}"),
            (
                "num_window_layers",
                linear + windows <= layers,
                f"must be <= {layers - linear}, the layers without linear attention",
            ),
            *(
                (field, not linear or value > 0, f"must be > 0 with num_linear_layers = {linear}")
                for field, value in (
                    ("linear_params", self.linear_params),
                    ("linear_state_bytes", self.linear_state_bytes),
                )
            ),
            (
                "window_tokens",
                not windows or self.window_tokens > 0,
                f"must be > 0 with num_window_layers = {windows}",
            ),
        ]

    @property
    def value_dim(self) -> int:
        """Size of a value head."""
        return self.v_head_dim or self.head_dim

    # -- weights -----------------------------------------------------------------------------------

    @property
    def attention_params(self) -> int:
        """Weights of one layer's attention; the mean where some layers are linear."""
        if not self.num_linear_layers:
            return self.full_attention_params
        linear = self.num_linear_layers * self.linear_params
        full = (self.num_layers - self.num_linear_layers) * self.full_attention_params
        return -(-(linear + full) // self.num_layers)

    @property
    def full_attention_params(self) -> int:
        """Weights of attention that is not linear: the projections of queries, keys, values, output."""
        hidden, heads, size, value = (
            self.hidden_size,
            self.num_attention_heads,
            self.head_dim,
            self.value_dim,
        )
        gate = 2 if self.attention_gate else 1
        if not self.kv_lora_rank:
            keys_and_values = self.num_kv_heads * (size + value)
            return hidden * (gate * heads * size + keys_and_values + heads * value)
        rank, rope, q_rank = self.kv_lora_rank, self.qk_rope_head_dim, self.q_lora_rank
        q_size = gate * heads * (size + rope)
        query = q_rank * (hidden + q_size) if q_rank else hidden * q_size
        latent = hidden * (rank + rope) + rank * heads * (size + value)
        return query + latent + heads * value * hidden

    # -- KV cache ----------------------------------------------------------------------------------

    @property
    def kv_bytes_per_token_full_layer(self) -> int:
        """Bytes of keys and values of one token in one layer that keeps them.

        Grouped heads: kv_heads * (key size + value size); latent attention: kv_lora_rank +
        qk_rope_head_dim.
        """
        if self.kv_lora_rank:
            return weight_bytes(self.kv_lora_rank + self.qk_rope_head_dim, self.kv_bits)
        return weight_bytes(self.num_kv_heads * (self.head_dim + self.value_dim), self.kv_bits)

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """Bytes that one more token adds to the KV cache of one layer, in the mean over all layers.

        Linear layers add nothing; window layers count as if they kept every token (an upper bound, exact
        for contexts within the window: see :meth:`kv_bytes`).
        """
        full = self.kv_bytes_per_token_full_layer
        if not self.num_linear_layers:
            return full
        return -(-full * (self.num_layers - self.num_linear_layers) // self.num_layers)

    def kv_bytes(self, num_tokens: int) -> int:
        """Return the bytes that one sequence of ``num_tokens`` keeps in all layers.

        Window layers keep at most ``window_tokens``; a linear layer keeps its state whatever the length.
        """
        full = self.num_layers - self.num_linear_layers - self.num_window_layers
        kept = full * num_tokens + self.num_window_layers * min(num_tokens, self.window_tokens)
        states = self.num_linear_layers * self.linear_state_bytes
        return kept * self.kv_bytes_per_token_full_layer + states

    def attended_tokens(self, kv_tokens: int, num_tokens: int) -> int:
        """Return how many of ``kv_tokens`` entries a layer reads, in the mean over all layers, rounded up.

        A full layer reads all of them, a window layer min(kv_tokens, window_tokens * num_tokens), a
        linear layer none. One entry is :attr:`kv_bytes_per_token_full_layer` bytes. ``kv_tokens`` is
        summed over sequences, ``num_tokens`` are their new tokens; it serves (new token, entry) pairs
        just as well, of which a new token has at most ``window_tokens`` too.
        """
        linear, windows = self.num_linear_layers, self.num_window_layers
        if not linear and not windows:
            return kv_tokens
        seen = (self.num_layers - linear - windows) * kv_tokens
        seen += windows * min(kv_tokens, self.window_tokens * num_tokens)
        return -(-seen // self.num_layers)

    @property
    def attention_flops_per_pair(self) -> int:
        """Operations for one (new token, KV entry) pair in one layer that has it: scores, weighted sum.

        Latent attention is counted in its absorbed form, which reads the latents as they lie.
        """
        if self.kv_lora_rank:
            return 2 * self.num_attention_heads * (2 * self.kv_lora_rank + self.qk_rope_head_dim)
        return 2 * self.num_attention_heads * (self.head_dim + self.value_dim)

    def attention_of(self, num_layers: int) -> tuple[int, int]:
        """Return how many of ``num_layers`` layers are linear and how many have windows, in proportion."""
        linear = (2 * self.num_linear_layers * num_layers + self.num_layers) // (
            2 * self.num_layers
        )
        windows = (2 * self.num_window_layers * num_layers + self.num_layers) // (
            2 * self.num_layers
        )
        return linear, min(windows, num_layers - linear)
