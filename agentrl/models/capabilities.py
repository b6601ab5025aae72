"""Proofs of what a model is: what mixes its positions, under which masks, and whether another way gives its numbers.

The learner's shared prefixes and the embedded engine's cache replace a model's attention. That is right only where
nothing else mixes positions and where attention is told all that its masks say. It is proven on the model's miniature
(`agentrl.models.miniature`), in float32, token by token, over rows longer than every window and chunk, by

- independence: tokens of one row are changed, and no state of another row moves;
- equality: every state is that of the model's own forward pass over the row alone;
- and again, briefly, on the model itself, which may have been changed since its class was written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from agentrl.models.miniature import WORDS, longest_window, miniature

Way = Callable[[Any, list[list[int]]], list[Tensor]]  # (causal LM, rows) to the states of each, (length, width)

ALONE = "agentrl_alone"  # attention in which each token sees itself alone
TRUNK, BRANCH = 40, 12  # tokens that the rows of a proof share, and of their own
FLOAT32, ROUNDED = 1e-3, 0.1  # what may be off, in standard deviations; of lower precisions only the gross


class NotProven(Exception):
    """Another way through the model is not the model's own; the message ends a sentence that names the model."""


def inner_model(model: Any) -> Any:
    """Return the part of a causal LM that computes the states its output layer reads.

    Raises:
        NotProven: it has no such part.
    """
    if type(model) not in _PARTS:
        with torch.no_grad():
            _PARTS[type(model)] = next((part for part in _CANDIDATES if _computes(model, part(model))), None)
    part = _PARTS[type(model)]
    if part is None:
        raise NotProven("its states cannot be told from its logits")
    return part(model)


_CANDIDATES: list[Callable[[Any], Any]] = [
    lambda model: model.base_model,
    lambda model: model.get_decoder(),
    lambda model: getattr(model, "model", model),
]
_PARTS: dict[type, Callable[[Any], Any] | None] = {}  # of each class


def _computes(model: Any, part: Any) -> bool:
    """Tell whether the model's forward pass runs a part that gives states."""
    if part is model:
        return False
    given: list[Any] = []
    hook = part.register_forward_hook(lambda *call: given.append(getattr(call[2], "last_hidden_state", None)))
    try:
        model(input_ids=_ids(model, [[3, 4]]), use_cache=False)
    finally:
        hook.remove()
    return len(given) == 1 and given[0] is not None


def own_states(model: Any, rows: list[list[int]]) -> list[Tensor]:
    """Run the model's own forward pass over each row alone; the states of each, (length, width)."""
    passes = (inner_model(model)(input_ids=_ids(model, [row]), use_cache=False) for row in rows)
    return [done.last_hidden_state[0] for done in passes]


@dataclass(frozen=True)
class Attended:
    """One call of attention, as a layer made it."""

    module: str  # the layer's class
    mask: Tensor | None  # (batch or 1, heads or 1, tokens, tokens), True where a query sees a key
    window: int | None
    selects: bool = False  # its keys are picked by score

    def unsaid(self) -> bool:
        """Tell whether the mask hides or shows more than order and the window that attention is told of."""
        if self.mask is None:
            return False
        keys = torch.arange(self.mask.shape[-1], device=self.mask.device)
        queries = keys[:, None]
        assumed = keys <= queries if self.window is None else (keys <= queries) & (keys > queries - self.window)
        seen = self.mask if self.mask.dtype == torch.bool else self.mask > -1.0
        return seen.shape[-2:] != assumed.shape or not bool((seen == assumed).all())


class Untried(NotProven):
    """Nothing is known against it, but its windows are longer than can be tried."""


class Kind:
    """Facts that a model's class and settings decide, found out on its miniature when they are first asked for.

    Where its class makes no miniature, on the model itself, if it has no windows.
    """

    def __init__(self, model: Any) -> None:
        try:
            self.subject = miniature(model)
        except Exception as error:  # whatever its class makes of settings that no checkpoint has
            if (longest := longest_window(model.config)) > TRUNK // 2:
                why = f"windows of {longest} tokens, of which no small copy can be made to try ({_line(error)})"
                raise Untried(f"it has {why}") from None
            self.subject = model
        single = next(self.subject.parameters()).dtype == torch.float32
        self.allowed = FLOAT32 if single else ROUNDED
        self.rows, self.words = _rows(self.subject), _words(self.subject)

    @cached_property
    def own(self) -> list[Tensor]:
        """The states of the rows by the miniature's own forward pass."""
        with torch.no_grad(), _Sentences():
            return own_states(self.subject, self.rows)

    def refuse_looking_ahead(self) -> None:
        """Show that rows can stand side by side, padded on the right.

        Raises:
            NotProven: a token's state depends on what stands behind it, or in another row.
        """
        first, second, _ = self.rows
        short, other = first[: TRUNK // 2], [*second[:TRUNK], *_changed(second[TRUNK:], self.words)]
        with torch.no_grad(), _Sentences():
            one, two = (_padded(self.subject, [short, row]) for row in (second, other))
            ends = [own_states(self.subject, [second[:count]])[0] for count in (TRUNK // 2, TRUNK - 9, TRUNK + 1)]
        if _off(two[1, :TRUNK], self.own[1][:TRUNK]) > self.allowed:
            raise NotProven("a token's state depends on the tokens behind it")
        if max(_off(end, self.own[1][: len(end)]) for end in ends) > self.allowed:
            raise NotProven("a token's state depends on how many tokens stand behind it, as where it selects by score")
        for states in (one, two):
            if _off(states[0, : len(short)], self.own[0][: len(short)]) > self.allowed:
                raise NotProven("the states of a row depend on what is padded behind it, or on the rows beside it")

    def refuse_other_mixing(self) -> None:
        """Show that positions are mixed by attention alone, and that attention is told what its masks say.

        Raises:
            NotProven: it names the module.
        """
        mixing, calls = self._mixing
        if mixing is not None:
            raise NotProven(f"{mixing} mixes positions, and not by transformers' attention interface")
        if (selecting := next((call for call in calls if call.selects), None)) is not None:
            raise NotProven(f"{selecting.module} selects by score what it attends to")
        unsaid = next((call for call in calls if call.unsaid()), None)
        if unsaid is not None:
            raise NotProven(f"the mask of {unsaid.module} hides more than the window its attention is told of")

    @cached_property
    def _mixing(self) -> tuple[str | None, list[Attended]]:
        """The first module that mixes positions where attention does not, and the calls of attention."""
        row, at = self.rows[0], TRUNK // 2
        ids = _ids(self.subject, [row, [*row[:at], *_changed(row[at : at + 1], self.words), *row[at + 1 :]]])
        watched, calls = _Watched(self.subject, at, self.allowed / 10), list[Attended]()
        inner = inner_model(self.subject)
        with torch.no_grad(), _Sentences(), _alone(self.subject, calls), watched:
            inner(input_ids=ids, use_cache=False)
        return watched.first, calls

    def refuse_difference(self, way: Way, *, gradient: bool) -> None:
        """Show that ``way`` computes what the miniature does, and no row what another one moves.

        Raises:
            NotProven: why not.
        """
        first, second, third = self.rows
        with torch.no_grad(), _Sentences():
            found = way(self.subject, self.rows)
            moved = way(self.subject, [first, [*second[:TRUNK], *_changed(second[TRUNK:], self.words)], third])
        if max(_off(moved[0], found[0]), _off(moved[2], found[2])) > self.allowed / 10:
            raise NotProven("the states of a row move when another row is changed")
        _refuse_apart(found, self.own, self.allowed)
        if gradient:
            _refuse_gradient(self.subject, way, self.rows, self.allowed)


_KINDS: OrderedDict[tuple[type, str], Kind] = OrderedDict()  # the last few: learner and engine ask about one model


def kind_of(model: Any) -> Kind:
    """Return what is known of models of this class and these settings.

    Raises:
        NotProven: no miniature can be made.
    """
    key = type(model), model.config.to_json_string(use_diff=False)
    if key not in _KINDS:
        kind = Kind(model)
        if kind.subject is model:  # whose weights change
            return kind
        _KINDS[key] = kind
        while len(_KINDS) > 4:
            _KINDS.popitem(last=False)
    return _KINDS[key]


class Capabilities:
    """Proofs about one model: about its kind, and about itself."""

    def __init__(self, model: Any) -> None:
        self.model, self.name = model, type(model).__name__

    def refuse_untrainable(self) -> None:
        """Show that rows can be trained side by side, padded on the right.

        Raises:
            NotProven: why not.
        """
        kind_of(self.model).refuse_looking_ahead()

    def refuse_kind(self, way: Way, *, gradient: bool = False) -> None:
        """Show that ``way`` computes what models of this kind do.

        Args:
            gradient: compare gradients too.

        Raises:
            NotProven: why not.
        """
        kind = kind_of(self.model)
        kind.refuse_other_mixing()
        kind.refuse_difference(way, gradient=gradient)

    def agrees(self, way: Way) -> bool:
        """Tell whether ``way`` computes what the model itself does, on two short rows."""
        try:
            self.refuse_itself(way)
        except NotProven:
            return False
        return True

    def refuse_itself(self, way: Way, *, gradient: bool = False) -> None:
        """Show, on two short rows, that ``way`` computes what this very model does: it may have been changed.

        Raises:
            NotProven: why not.
        """
        model = self.model
        single = next(model.parameters()).dtype == torch.float32
        rows, allowed = _rows(model)[:2], FLOAT32 if single else ROUNDED
        training = model.training
        model.eval()  # dropout would differ
        try:
            with _Sentences(), torch.no_grad():
                _refuse_apart(way(model, rows), own_states(model, rows), allowed, typical=not single)
            if gradient:
                _refuse_gradient(model, way, rows, 10 * allowed)
        finally:
            model.train(training)


def _refuse_apart(found: list[Tensor], wanted: list[Tensor], allowed: float, *, typical: bool = False) -> None:
    off = max(_off(*pair, typical=typical) for pair in zip(found, wanted, strict=True))
    if not off <= allowed:
        raise NotProven(f"its states are off by {off:.2g} of their standard deviation")


def _refuse_gradient(model: Any, way: Way, rows: list[list[int]], allowed: float) -> None:
    with _Sentences():
        found, wanted = (_gradient(model, w, rows) for w in (way, own_states))
    off = _off(found, wanted, typical=True)
    if not off <= allowed:
        raise NotProven(f"its gradient is off by {off:.2g} of its standard deviation")


def _gradient(model: Any, way: Way, rows: list[list[int]]) -> Tensor:
    """Compute the gradients of the first parameters that are trained: through all layers."""
    trained = ([p for p in part.parameters() if p.requires_grad] for part in inner_model(model).children())
    first = [parameters[0] for parameters in trained if parameters]
    with torch.enable_grad():
        states = torch.cat(way(model, rows)).float()
        value = (states.sin() * torch.linspace(-1, 1, states.shape[-1], device=states.device)).sum()
        gradients = torch.autograd.grad(value, first, allow_unused=True)  # a vision tower's are
    return torch.cat([gradient.float().flatten() for gradient in gradients if gradient is not None])


def _off(found: Tensor, wanted: Tensor, *, typical: bool = False) -> float:
    """Measure how far one is off the other, at most (or typically), in standard deviations of the other."""
    if found.shape != wanted.shape:
        return float("inf")
    apart = (found - wanted).float()
    off = apart.square().mean().sqrt() if typical else apart.abs().max()
    return float(off / wanted.float().std().clamp_min(1e-12))


def _rows(model: Any) -> list[list[int]]:
    """Three rows that begin alike: TRUNK tokens, then BRANCH of their own, one of them some more."""
    generator = torch.Generator().manual_seed(0)
    count = _words(model)
    trunk, *branches = (
        torch.randint(count, (size,), generator=generator).tolist() for size in (TRUNK, BRANCH, BRANCH + 3, BRANCH)
    )
    return [[*trunk, *branch] for branch in branches]


def _ids(model: Any, rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, device=model.get_input_embeddings().weight.device)


def _words(model: Any) -> int:
    """Count the token ids that a probe may use."""
    return min(WORDS, int(model.get_input_embeddings().num_embeddings))


def _changed(tokens: list[int], words: int) -> list[int]:
    return [(token + 1 + words // 2) % words for token in tokens]


def _padded(model: Any, rows: list[list[int]]) -> Tensor:
    """Run rows side by side, padded on the right; their states, (rows, longest, width)."""
    longest = max(map(len, rows))
    ids = _ids(model, [[*row, *[0] * (longest - len(row))] for row in rows])
    states: Tensor = inner_model(model)(input_ids=ids, use_cache=False).last_hidden_state
    return states


class _Sentences:
    """Inside, whatever a model's own code raises becomes ``NotProven``."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, NotImplementedError):
            raise NotProven(str(error)) from None
        if isinstance(error, Exception) and not isinstance(error, NotProven):
            raise NotProven(f"its own code raises {_line(error)}") from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


class _Watched:
    """Inside, finds the first module, innermost first, whose output moves at other positions than ``at``.

    The pass must be over two rows that differ at ``at`` alone.
    """

    def __init__(self, model: nn.Module, at: int, allowed: float) -> None:
        self.at, self.allowed = at, allowed
        self.first: str | None = None
        self._model = model
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        own = [m for m in self._model.modules() if not type(m).__module__.startswith("torch.nn")]
        self._hooks = [m.register_forward_hook(self._look, with_kwargs=True) for m in own]

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _look(self, module: nn.Module, given: Any, named: Any, out: Any) -> None:
        if self.first is None and self._move(out) and not self._move((given, named)):
            self.first = type(module).__name__

    def _move(self, values: Any) -> bool:
        """Tell whether states of both rows, (2, tokens, width), differ elsewhere."""
        return any(self._moves(value) for value in _tensors(values))

    def _moves(self, states: Tensor) -> bool:
        if states.ndim != 3 or states.shape[0] != 2 or not states.is_floating_point():
            return False
        apart = (states[0] - states[1]).abs().amax(-1) / states.std().clamp_min(1e-12)
        apart[self.at :][:1] = 0.0
        return bool(apart.max() > self.allowed)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)


_calls: ContextVar[list[Attended]] = ContextVar("agentrl_attended")


@contextmanager
def _alone(model: Any, calls: list[Attended]) -> Iterator[None]:
    """Inside, attention shows each token itself alone, and notes how it was called."""
    before = model.config.get_text_config()._attn_implementation
    token = _calls.set(calls)
    try:
        model.set_attn_implementation(ALONE)
        yield
    finally:
        model.set_attn_implementation(before)
        _calls.reset(token)


def _attend_alone(
    module: Any,
    query: Tensor,  # (batch, heads, tokens, dim)
    key: Tensor,
    value: Tensor,  # (batch, kv heads, tokens, dim)
    attention_mask: Tensor | None,
    *given: Any,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: each token's own value."""
    selects = unused.get("indices") is not None
    _calls.get().append(Attended(type(module).__name__, attention_mask, sliding_window, selects))
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None


def _plain_mask(*given: Any, **more: Any) -> Tensor:
    """The mask that scaled dot product attention would be given, written out."""
    mask: Tensor = sdpa_mask(*given, **more | {"allow_is_causal_skip": False})
    return mask


AttentionInterface.register(ALONE, _attend_alone)
AttentionMaskInterface.register(ALONE, _plain_mask)
