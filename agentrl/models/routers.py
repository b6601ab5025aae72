"""The routers of a mixture of experts: which modules choose the experts of a token, and how to take part in it.

A router scores the experts, takes those of the largest scores by ``topk``, and makes weights of the scores at them:
each family in its own way, with groups, biases, sigmoids, sums that are 1. So nothing of that is written again here:
the router runs as it is, and only what ``topk`` returns to it is replaced. Which module calls it is found by running
the model's miniature.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from agentrl.errors import UserError
from agentrl.models.lm_head import NotProven
from agentrl.models.miniature import build_miniature

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_PROBE = 5  # tokens that a miniature is run on

# From a router's number among the routers, its scores, (tokens, experts), and its own choice, (tokens, top_k), to the
# choice that is taken
ChooseExperts = Callable[[int, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Routers:
    """The routers of a model, in the order in which tokens pass them.

    Args:
        names: of their modules.
        experts: that each chooses among.
        top_k: experts of a token.
    """

    names: tuple[str, ...]
    experts: int
    top_k: int

    def list_layers(self) -> tuple[int, ...]:
        """List the numbers of the model's layers that the routers are in.

        Raises:
            NotProven: a router is in none, or a layer has several.
        """
        found = [re.search(r"\.layers\.(\d+)\.", f".{name}.") for name in self.names]
        layers = tuple(int(one[1]) for one in found if one is not None)
        if len(layers) < len(self.names) or len(set(layers)) < len(layers):
            raise NotProven(f"its routers, such as {self.names[0]}, are not one in a numbered layer")
        return layers

    @contextmanager
    def choose(self, model: PreTrainedModel, choose: ChooseExperts) -> Iterator[None]:
        """Let ``choose`` choose the experts of the passes in this block, also where a layer is computed again.

        Weights are made of the router's own scores at them.

        Raises:
            NotProven: a router chooses by none or several ``topk``, as a pass shows.
        """
        modules = [model.get_submodule(name) for name in self.names]
        own = [vars(module).get("forward") for module in modules]
        for router_index, module in enumerate(modules):
            module.forward = partial(self._route, router_index, module.forward, choose)
        try:
            yield
        finally:
            for module, forward in zip(modules, own, strict=True):
                if forward is None:
                    del module.forward
                else:
                    module.forward = forward

    def _route(
        self, router_index: int, forward: Callable[..., Any], choose: ChooseExperts, *args: Any, **kwargs: Any
    ) -> Any:
        chooser = _TopK(self.experts, self.top_k, partial(choose, router_index))
        with chooser:  # in whatever thread the pass is: that of a backward pass is another one on a GPU
            output = forward(*args, **kwargs)
        if chooser.calls != 1:
            name = self.names[router_index]
            raise NotProven(f"its router {name} chose experts {chooser.calls} times in a pass, not once")
        return output


class _TopK(TorchFunctionMode):
    """Lets ``choose`` choose in place of the ``topk`` of so many among so many experts."""

    def __init__(self, experts: int, top_k: int, choose: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.experts, self.top_k, self.choose, self.calls = experts, top_k, choose, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return output
        scores, own = args[0] if args else (kwargs or {})["input"], output[1]
        if scores.ndim != 2 or scores.shape[-1] != self.experts or own.shape[-1] != self.top_k:
            return output  # of groups of experts, or of what attention looks at
        self.calls += 1
        chosen = self.choose(scores, own)
        if chosen is own:
            return output
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


@contextmanager
def refuse_replay(what: str) -> Iterator[None]:
    """Raise UserError for a NotProven of this block: ``what`` cannot be, the reason, and the setting to leave out."""
    try:
        yield
    except NotProven as reason:
        raise UserError(f"learner.router_replay: {what}: {reason}; leave it out") from None


def find_routers(model: PreTrainedModel) -> Routers:
    """Find the routers of a model, without its adapter.

    Raises:
        NotProven: it is no mixture of experts, or its routers cannot be followed; the reason.
    """
    experts, top_k = _read_sizes(model)
    if not experts or not top_k:
        raise NotProven("it is no mixture of experts, as its config has no number of them and of those of a token")
    try:
        small = build_miniature(model)
    except Exception as error:  # whatever its class makes of settings that no checkpoint has
        raise NotProven(f"no small copy of it can be made to find its routers ({type(error).__name__})") from None
    names = _find_choosing_modules(small)
    if not names:
        raise NotProven("no module of it chooses experts by topk")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise NotProven(f"its router {twice[0]} chooses experts more than once in a pass")
    missing = next((name for name in names if not _has_module(model, name)), None)
    if missing is not None:
        raise NotProven(f"its small copy has a router {missing}, which it has not itself")
    return Routers(tuple(names), experts, top_k)


def _read_sizes(model: PreTrainedModel) -> tuple[int, int]:
    """Read how many experts there are, and how many of a token; 0 where a config does not say it as one number."""
    config = model.config.get_text_config()
    values = [[getattr(config, name, None) for name in names] for names in (EXPERTS, TOP_K_NAMES)]
    experts, top_k = (next((v for v in own if type(v) is int and v > 0), 0) for own in values)
    return experts, top_k


@torch.no_grad()
def _find_choosing_modules(model: PreTrainedModel) -> list[str]:
    """Run a small model; list the innermost modules in which experts are chosen, in order, once for each choice."""
    experts, top_k = _read_sizes(model)
    inside, found = list[str](), list[str]()

    def note(scores: Tensor, own: Tensor) -> Tensor:
        found.append(inside[-1])
        return own

    def enter(name: str, *_: object) -> None:
        inside.append(name)

    def leave(*_: object) -> None:
        inside.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(partial(enter, name))
        module.register_forward_hook(leave)
    with _TopK(experts, top_k, note):
        model(input_ids=torch.arange(_PROBE)[None], use_cache=False)
    return found


def _has_module(model: nn.Module, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True
