"""Proofs by perturbation: tokens of a few rows are changed, and the hidden states that move, or differ, are compared.

Each ``prove_*`` raises `NotProven`, whose message ends a sentence that names the model:

- causality: no state moves when tokens behind it, or in another row, are changed;
- mixing: no module but attention moves a state at another position, and attention is told all that its masks say;
- equality: another way through the model gives the states of its own forward pass over each row alone, and the same
  gradient through them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from agentrl.models.lm_head import NotProven, find_backbone
from agentrl.models.miniature import WEIGHTS, WORDS
from agentrl.models.own_logits import compute_own_logits
from agentrl.models.position_mixing import AttentionCall, find_mixing

StatesFunction = Callable[[PreTrainedModel, list[list[int]]], list[Tensor]]  # rows to states, (length, width) each

NextLogits = Iterable[tuple[int, int, Tensor]]  # a row, how many of its tokens, and the logits behind the last of them
LogitsFunction = Callable[[PreTrainedModel, list[list[int]]], NextLogits]

TRUNK, BRANCH = 40, 12  # tokens that the rows of a proof share, and of their own
FLOAT32, ROUNDED = 1e-3, 0.1  # what may be off, in standard deviations; of lower precisions only the gross


def run_own_states(model: PreTrainedModel, rows: list[list[int]]) -> list[Tensor]:
    """Run the model's own forward pass over each row alone; the states of each, (length, width)."""
    outputs = (find_backbone(model)(input_ids=_to_tensor(model, [row]), use_cache=False) for row in rows)
    return [output.last_hidden_state[0] for output in outputs]


class PerturbationProof:
    """Proofs on one model, over three rows that share ``TRUNK`` tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.tolerance = FLOAT32 if _is_float32(model) else ROUNDED
        self.rows, self._words = _draw_rows(model), _count_words(model)

    @cached_property
    def own_states(self) -> list[Tensor]:
        """Return the states of the rows by the model's own forward pass."""
        with torch.no_grad(), _OwnErrors():
            return run_own_states(self.model, self.rows)

    @cached_property
    def own_logits(self) -> list[Tensor]:
        """Return the logits of the rows by the model's own forward pass."""
        with torch.no_grad(), _OwnErrors():
            return [compute_own_logits(self.model, row) for row in self.rows]

    @cached_property
    def in_double(self) -> PerturbationProof:
        """Return the same proof in double precision: some models magnify the rounding of single precision.

        Its proofs are made within `NoSinglePrecision`.
        """
        return PerturbationProof(to_double(copy.deepcopy(self.model)))

    def prove_repeatable(self) -> None:
        """Show that the model gives logits, and the same ones when it is asked again.

        Raises:
            NotProven: it does not.
        """
        row = self.rows[0]
        with torch.no_grad(), _OwnErrors():
            one, other = (compute_own_logits(self.model, row) for _ in range(2))
        if not bool(one.isfinite().all()):
            raise NotProven("its logits are not finite")
        if _distance(other, one) > self.tolerance:
            raise NotProven("it gives other logits each time that it is asked, as by random hashes (`hash_seed`)")

    def prove_causal_alone(self) -> None:
        """Show that a token's logits, by the model's pass over its row alone, depend on no token behind it.

        Raises:
            NotProven: they do.
        """
        row, expected = self.rows[1], self.own_logits[1]
        with torch.no_grad(), _OwnErrors():
            ends = [compute_own_logits(self.model, row[:count]) for count in (TRUNK // 2, TRUNK - 9, TRUNK + 1)]
            changed = compute_own_logits(self.model, self._change_branch(row))[:TRUNK]
        if _distance(changed, expected[:TRUNK]) > self.tolerance:
            raise NotProven("a token's logits depend on the tokens behind it")
        if max(_distance(end, expected[: len(end)]) for end in ends) > self.tolerance:
            raise NotProven("a token's logits depend on how many tokens stand behind it, as where it selects by score")

    def prove_own_logits(self, run_logits: LogitsFunction) -> None:
        """Show that ``run_logits`` computes what the model's own pass over each row alone does.

        Raises:
            NotProven: the reason.
        """
        _prove_own_logits(self.model, run_logits, self.rows, self.own_logits, self.tolerance)

    def prove_causal(self) -> None:
        """Show that rows can stand side by side, padded on the right.

        Raises:
            NotProven: a token's state depends on what stands behind it, or in another row.
        """
        first, second, _ = self.rows
        short, other = first[: TRUNK // 2], self._change_branch(second)
        with torch.no_grad(), _OwnErrors():
            one, two = (_run_padded(self.model, [short, row]) for row in (second, other))
            ends = [run_own_states(self.model, [second[:count]])[0] for count in (TRUNK // 2, TRUNK - 9, TRUNK + 1)]
        if _distance(two[1, :TRUNK], self.own_states[1][:TRUNK]) > self.tolerance:
            raise NotProven("a token's state depends on the tokens behind it")
        if max(_distance(end, self.own_states[1][: len(end)]) for end in ends) > self.tolerance:
            raise NotProven("a token's state depends on how many tokens stand behind it, as where it selects by score")
        for states in (one, two):
            if _distance(states[0, : len(short)], self.own_states[0][: len(short)]) > self.tolerance:
                raise NotProven("the states of a row depend on what is padded behind it, or on the rows beside it")

    def prove_attention_mixes_alone(self) -> None:
        """Show that positions are mixed by attention alone, and that attention is told what its masks say.

        Raises:
            NotProven: it names the module.
        """
        mixing, calls = self._mixing
        if mixing is not None:
            raise NotProven(f"{mixing} mixes positions, and not by transformers' attention interface")
        if (selecting := next((call for call in calls if call.selects), None)) is not None:
            raise NotProven(f"{selecting.module} selects by score what it attends to")
        masked = next((call for call in calls if call.has_other_mask()), None)
        if masked is not None:
            raise NotProven(f"the mask of {masked.module} hides more than the window its attention is told of")

    @cached_property
    def _mixing(self) -> tuple[str | None, list[AttentionCall]]:
        row, at = self.rows[0], TRUNK // 2
        changed = [*row[:at], *_change_tokens(row[at : at + 1], self._words), *row[at + 1 :]]
        with torch.no_grad(), _OwnErrors():
            return find_mixing(self.model, _to_tensor(self.model, [row, changed]), at, self.tolerance / 10)

    def prove_equal(self, run_states: StatesFunction, *, gradient: bool) -> None:
        """Show that ``run_states`` computes what the model does, and that no row moves when another is changed.

        Raises:
            NotProven: the reason.
        """
        first, second, third = self.rows
        with torch.no_grad(), _OwnErrors():
            states = run_states(self.model, self.rows)
            moved = run_states(self.model, [first, self._change_branch(second), third])
        if max(_distance(moved[0], states[0]), _distance(moved[2], states[2])) > self.tolerance / 10:
            raise NotProven("the states of a row move when another row is changed")
        _prove_close(states, self.own_states, self.tolerance)
        if gradient:
            _prove_gradient(self.model, run_states, self.rows, self.tolerance)

    def _change_branch(self, row: list[int]) -> list[int]:
        return [*row[:TRUNK], *_change_tokens(row[TRUNK:], self._words)]


def prove_equal_briefly(model: PreTrainedModel, run_states: StatesFunction, *, gradient: bool) -> None:
    """Show on two short rows that ``run_states`` computes what the model does, as it is: in its own precision.

    Raises:
        NotProven: the reason.
    """
    float32 = _is_float32(model)
    rows, tolerance = _draw_rows(model)[:2], FLOAT32 if float32 else ROUNDED
    training = model.training
    model.eval()  # dropout would differ
    try:
        with _OwnErrors(), torch.no_grad():
            _prove_close(run_states(model, rows), run_own_states(model, rows), tolerance, typical=not float32)
        if gradient:
            _prove_gradient(model, run_states, rows, 10 * tolerance)
    finally:
        model.train(training)


def prove_own_logits_briefly(model: PreTrainedModel, run_logits: LogitsFunction) -> None:
    """Show on three rows that ``run_logits`` computes what the model does, as it is: in its own precision.

    What fails for a small model in single precision is tried in double.

    Raises:
        NotProven: the reason.
    """
    try:
        _compare_own_logits(model, run_logits)
    except NotProven as reason:
        if not _is_float32(model) or sum(p.numel() for p in model.parameters()) > WEIGHTS:
            raise
        try:
            with NoSinglePrecision():
                _compare_own_logits(to_double(copy.deepcopy(model)), run_logits)
        except Exception:  # as in `Capabilities`
            raise reason from None


def _compare_own_logits(model: PreTrainedModel, run_logits: LogitsFunction) -> None:
    float32, rows = _is_float32(model), _draw_rows(model)
    with _OwnErrors(), torch.no_grad():
        expected = [compute_own_logits(model, row) for row in rows]
    _prove_own_logits(model, run_logits, rows, expected, FLOAT32 if float32 else ROUNDED, typical=not float32)


def _prove_own_logits(
    model: PreTrainedModel,
    run_logits: LogitsFunction,
    rows: list[list[int]],
    expected: list[Tensor],
    tolerance: float,
    *,
    typical: bool = False,
) -> None:
    with _OwnErrors(), torch.no_grad():
        for row, count, logits in run_logits(model, rows):
            distance = _distance(logits, expected[row][count - 1], typical=typical)
            if not distance <= tolerance:
                raise NotProven(f"its logits are off by {distance:.2g} of their standard deviation")


def _prove_close(states: list[Tensor], expected: list[Tensor], tolerance: float, *, typical: bool = False) -> None:
    distance = max(_distance(*pair, typical=typical) for pair in zip(states, expected, strict=True))
    if not distance <= tolerance:
        raise NotProven(f"its states are off by {distance:.2g} of their standard deviation")


def _prove_gradient(
    model: PreTrainedModel, run_states: StatesFunction, rows: list[list[int]], tolerance: float
) -> None:
    with _OwnErrors():
        gradient, expected = (_compute_gradient(model, run, rows) for run in (run_states, run_own_states))
    distance = _distance(gradient, expected, typical=True)
    if not distance <= tolerance:
        raise NotProven(f"its gradient is off by {distance:.2g} of its standard deviation")


def _compute_gradient(model: PreTrainedModel, run_states: StatesFunction, rows: list[list[int]]) -> Tensor:
    """Compute the gradients of the first trained parameter of each part: through all layers. One flat tensor."""
    trained = ([p for p in part.parameters() if p.requires_grad] for part in find_backbone(model).children())
    first = [parameters[0] for parameters in trained if parameters]
    with torch.enable_grad():
        states = torch.cat(run_states(model, rows)).float()
        value = (states.sin() * torch.linspace(-1, 1, states.shape[-1], device=states.device)).sum()
        gradients = torch.autograd.grad(value, first, allow_unused=True)  # a vision tower's are
    return torch.cat([gradient.float().flatten() for gradient in gradients if gradient is not None])


def _distance(actual: Tensor, expected: Tensor, *, typical: bool = False) -> float:
    """Measure the largest (or the typical) difference, in standard deviations of what is expected."""
    if actual.shape != expected.shape:
        return float("inf")
    difference = (actual - expected).float()
    distance = difference.square().mean().sqrt() if typical else difference.abs().max()
    return float(distance / expected.float().std().clamp_min(1e-12))


def _is_float32(model: PreTrainedModel) -> bool:
    return next(model.parameters()).dtype in (torch.float32, torch.float64)


def _draw_rows(model: PreTrainedModel) -> list[list[int]]:
    """Draw three rows that begin alike: TRUNK tokens, then BRANCH of their own, one of them some more.

    One token is the padding's: a model may count its positions, or mask, by it.
    """
    generator = torch.Generator().manual_seed(0)
    count = _count_words(model)
    trunk, *branches = (
        torch.randint(count, (size,), generator=generator).tolist() for size in (TRUNK, BRANCH, BRANCH + 3, BRANCH)
    )
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    if isinstance(padding, int) and 0 <= padding < model.get_input_embeddings().num_embeddings:
        trunk[TRUNK // 4] = padding
    return [[*trunk, *branch] for branch in branches]


def _to_tensor(model: PreTrainedModel, rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, device=model.get_input_embeddings().weight.device)


def _count_words(model: PreTrainedModel) -> int:
    """Count the token ids that a proof may use."""
    return min(WORDS, int(model.get_input_embeddings().num_embeddings))


def _change_tokens(tokens: list[int], words: int) -> list[int]:
    return [(token + 1 + words // 2) % words for token in tokens]


def _run_padded(model: PreTrainedModel, rows: list[list[int]]) -> Tensor:
    """Run rows side by side, padded on the right; their states, (rows, longest, width)."""
    longest = max(map(len, rows))
    ids = _to_tensor(model, [[*row, *[0] * (longest - len(row))] for row in rows])
    states: Tensor = find_backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
    return states


def to_double(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model's weights doubles, and its experts a loop: transformers' grouped product takes none."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model.double()


class NoSinglePrecision(TorchFunctionMode):
    """A context in which double precision is computed in where a model's code asks for single, as for its norms."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        arguments = {name: _to_float64(value) for name, value in (kwargs or {}).items()}
        return func(*map(_to_float64, args), **arguments)


def _to_float64(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


class _OwnErrors:
    """A context in which whatever a model's own code raises becomes ``NotProven``."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, NotImplementedError):
            raise NotProven(str(error)) from None
        if isinstance(error, Exception) and not isinstance(error, NotProven):
            raise NotProven(f"its own code raises {summarize_error(error)}") from error


def summarize_error(error: Exception) -> str:
    """Write an exception's type and message in one line of at most 200 characters."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
