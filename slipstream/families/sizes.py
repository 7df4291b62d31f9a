"""A decoder in numbers, as its config.json describes it: sizes, parameters, FLOPs, names and shapes. No torch."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, get_args

from slipstream.families.record import DIVIDED, EMBEDDING, HEAD, LAYERS, NORM, Family, Keys, Projection, Weight
from slipstream.families.table import family_of

SIZES = {
    "hidden": "hidden_size",
    "inner": "intermediate_size",
    "vocabulary": "vocab_size",
    "experts": "num_experts",
    "expert_inner": "moe_intermediate_size",
}
"""Keys of config.json by the words of `Weight`."""


LENGTHS_DECIDE = frozenset({"dynamic", "longrope", "su"})
"""Rotary frequencies that are not the same for texts of all lengths."""


class Adapters(Protocol):
    """Of which modules, and how large (configs.learner.Lora)."""

    @property
    def rank(self) -> int: ...
    @property
    def projections(self) -> Collection[str]: ...


class Heads(NamedTuple):
    """Of attention."""

    query: int
    key_value: int
    size: int


def keys_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """With what the family takes for those left out. Raises LookupError."""
    aliased = {"num_experts": config["num_local_experts"]} if "num_local_experts" in config else {}
    return {**family_of(config).defaults, **config, **aliased}


def kinds_of_rope(config: Keys) -> set[str]:
    """Scalings of rotary frequencies, of which families with windows have one for each kind of layer."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    each = [one for one in given.values() if isinstance(one, Mapping)] or [given]
    return {str(one.get("rope_type", one.get("type", "default"))) for one in each}


def heads_of(config: Mapping[str, Any]) -> Heads:
    """Of the keys of a decoder's config.json."""
    known = keys_of(config)
    query = int(known["num_attention_heads"])
    size = known.get("head_dim") or known["hidden_size"] // query
    return Heads(query, int(known.get("num_key_value_heads") or query), int(size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A decoder, or what each of several tensor ranks has of it."""

    family: Family
    keys: Keys
    dims: Mapping[str, int]
    """Rows and columns of tensors, by the words of `Weight`."""
    has_experts: tuple[bool, ...]
    """Of each layer."""
    tied: bool
    experts_per_token: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Sizes":
        """From the keys of config.json. Raises LookupError: a family that is not trained, or a key is missing."""
        family, keys, heads = family_of(config), keys_of(config), heads_of(config)
        named = SIZES | dict(family.sizes)
        dims = {word: int(keys[key]) for word, key in named.items() if keys.get(key) is not None}
        dims |= {"query": heads.query * heads.size, "key": heads.key_value * heads.size, "head": heads.size}
        return cls(
            family=family,
            keys=keys,
            dims=dims,
            has_experts=tuple(
                bool(family.moe) and family.has_experts(keys, layer) for layer in range(int(keys["num_hidden_layers"]))
            ),
            tied=bool(keys.get("tie_word_embeddings")),
            experts_per_token=int(keys["num_experts_per_tok"]) if family.moe else 0,
        )

    def over(self, ranks: int) -> "Sizes":
        """What each of so many tensor ranks computes: hidden states are whole on all of them."""
        return replace(self, dims={w: size // ranks if w in DIVIDED else size for w, size in self.dims.items()})

    def among(self, ranks: int) -> "Sizes":
        """What is gathered on each of so many ranks that divide the experts."""
        dims = {name: size // ranks if name == "experts" else size for name, size in self.dims.items()}
        return replace(self, dims=dims)

    @property
    def layers(self) -> int:
        return len(self.has_experts)

    @property
    def hidden(self) -> int:
        return self.dims["hidden"]

    @property
    def query(self) -> int:
        """Heads times their size."""
        return self.dims["query"]

    @property
    def key_value(self) -> int:
        """Keys and values together."""
        return 2 * self.dims["key"]

    @property
    def intermediate(self) -> int:
        """Inside the MLP, for each token: of all experts that it goes to."""
        return self.experts_per_token * self.dims["expert_inner"] if self.family.moe else self.dims["inner"]

    @property
    def routed(self) -> int:
        """Hidden states that go to the experts of a token, or come from them; 0 without experts."""
        return self.experts_per_token * self.hidden

    def shape(self, weight: Weight) -> tuple[int, ...]:
        """Of a tensor, or of one expert's."""
        rows = sum(self.dims[word] for word in weight.rows.split("+"))
        return (rows, self.dims[weight.columns]) if weight.columns else (rows,)

    def layer(self, *, has_experts: bool) -> list[Weight]:
        """Tensors of a layer."""
        return list(self.family.layer(self.keys, has_experts=has_experts))

    def products(self, *, has_experts: bool, active: bool = False) -> int:
        """Parameters of a layer's matrices; `active`, those that a token goes through."""
        times = self.experts_per_token if active else self.dims.get("experts", 0)
        return sum(
            math.prod(self.shape(weight)) * (times if "*" in weight.name else 1)
            for weight in self.layer(has_experts=has_experts)
            if weight.columns
        )

    @property
    def layer_parameters(self) -> int:
        """Of the largest decoder layer; norms and biases are too small to count."""
        return max(self.products(has_experts=kind) for kind in set(self.has_experts))

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding; an output head of its own has as many."""
        return self.dims["vocabulary"] * self.hidden

    @property
    def largest_unit(self) -> int:
        """Parameters that are gathered together, at most."""
        return max(self.layer_parameters, self.embedding_parameters)

    @property
    def parameters(self) -> int:
        return self._in_layers() + (1 if self.tied else 2) * self.embedding_parameters

    @property
    def active_products(self) -> int:
        """Parameters of all layers' matrices that a token goes through."""
        return self._in_layers(active=True)

    def _in_layers(self, *, active: bool = False) -> int:
        return sum(
            self.has_experts.count(kind) * self.products(has_experts=kind, active=active)
            for kind in set(self.has_experts)
        )

    @property
    def projections(self) -> tuple[str, ...]:
        """Modules that may have adapters, in the order of a layer."""
        weights = [
            weight for kind in (False, True) if kind in self.has_experts for weight in self.layer(has_experts=kind)
        ]
        found = dict.fromkeys(w.name.split(".")[-2] for w in weights if w.columns and "*" not in w.name)
        return tuple(name for name in found if name in get_args(Projection))

    def adapter_parameters(self, lora: Adapters) -> int:
        """Of A and B of all layers."""
        chosen = [
            sum(self.shape(weight))
            for kind in self.has_experts
            for weight in self.layer(has_experts=kind)
            if weight.columns and "*" not in weight.name and weight.name.split(".")[-2] in lora.projections
        ]
        return lora.rank * sum(chosen)

    def flops(self, tokens: int, pairs: float, targets: int, *, frozen: bool = False) -> float:
        """Of forward and backward: products at active parameters, attention, and the output head at targets.

        Args:
            tokens: that go through the layers.
            pairs: of queries and keys that they see, in one layer on average.
            targets: tokens in the loss.
            frozen: weights, which have no gradient.
        """
        products = self.active_products * tokens + self.embedding_parameters * targets
        return (4.0 if frozen else 6.0) * products + 12.0 * self.query * pairs * self.layers

    def window(self, layer: int) -> int | None:
        """Tokens that a layer's attention sees, the token itself counted; None for all."""
        return self.family.window(self.keys, layer)

    def problem_with_ends(self, context: int) -> str:
        """Why a learner and an engine would not compute the same, and what to do; empty where they do.

        Args:
            context: most tokens of prompt and answer.
        """
        kind = self.keys.get("model_type")
        if rope := kinds_of_rope(self.keys) & LENGTHS_DECIDE:
            return (
                f"model.path: a {kind!r} model with rope type {min(rope)!r}, whose frequencies follow the longest text"
                " of a batch, so a token's logprob would depend on its neighbours; take a model with a fixed scaling"
                " (yarn, llama3, linear)"
            )
        windows = [window for window in map(self.window, range(self.layers)) if window is not None]
        if self.family.windows_in_sglang or min(windows, default=context) >= context:
            return ""
        return (
            f"model.path: a {kind!r} model whose attention sees {min(windows)} tokens (sliding_window); engines let it"
            f" see all {context} of data.max_prompt_tokens + max_new_tokens (rollout, evaluation); lower these, or, to"
            ' train the model without a window, set "sliding_window": null in config.json'
        )

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Every tensor of the checkpoint by its name, but for `*` (`Sizes.tensors`); a tied head is the embedding."""
        yield EMBEDDING, Weight(EMBEDDING, "vocabulary", "hidden")
        for number, kind in enumerate(self.has_experts):
            for weight in self.layer(has_experts=kind):
                yield f"{LAYERS}{number}.{weight.name}", weight
        yield NORM, Weight(NORM, "hidden")
        if not self.tied:
            yield HEAD, Weight(HEAD, "vocabulary", "hidden")

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every logical tensor."""
        for name, weight in self.weights():
            for number in range(self.dims["experts"]) if "*" in name else (0,):
                yield name.replace("*", str(number)), self.shape(weight)
