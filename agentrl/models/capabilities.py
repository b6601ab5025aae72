"""The capabilities of a model: rows trained side by side, shared prefixes, the embedded engine's cache.

The learner's shared prefixes and the embedded engine's cache replace a model's attention. That is right only where
nothing else mixes positions and where attention is told all that its masks say. It is proven by perturbation
(`agentrl.models.perturbation`), on the model's miniature (`agentrl.models.miniature`), in float32, over rows longer
than every window and chunk; and again, briefly, on the model itself, which may have been changed since its class was
written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from transformers import PreTrainedModel

from agentrl.models.lm_head import NotProven
from agentrl.models.miniature import build_miniature, find_longest_window
from agentrl.models.perturbation import (
    TRUNK,
    LogitsFunction,
    NoSinglePrecision,
    PerturbationProof,
    StatesFunction,
    prove_equal_briefly,
    prove_own_logits_briefly,
    summarize_error,
)


class NotTestable(NotProven):
    """Nothing is known against the model, but its windows are longer than a proof's rows."""


class Capabilities:
    """Proofs about one model: about its kind, and about itself. Each ``prove_*`` raises `NotProven` with the reason."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.name = model, type(model).__name__

    def prove_trainable(self) -> None:
        """Show that rows can be trained side by side, padded on the right."""
        self._prove(PerturbationProof.prove_causal)

    def prove_causal_alone(self) -> None:
        """Show that a row's logits, by the model's own pass over it alone, are those that sampling would have had."""
        self._prove(PerturbationProof.prove_causal_alone)

    def prove_repeatable(self) -> None:
        """Show that the model gives the same logits each time."""
        self._prove(PerturbationProof.prove_repeatable)

    def prove_decoder(self) -> None:
        """Show that the model's settings do not make it an encoder, whose tokens see all others."""
        if getattr(self.model.config.get_text_config(), "is_decoder", None) is False:
            raise NotProven(
                "as its settings are it is an encoder, whose tokens see those behind them; "
                "load it as a decoder: is_decoder=True in its config.json"
            )

    def prove_kind(self, run_states: StatesFunction, *, gradient: bool = False) -> None:
        """Show that ``run_states`` computes what models of this class and these settings do.

        Args:
            gradient: compare gradients too.
        """
        find_proof(self.model).prove_attention_mixes_alone()
        self._prove(lambda proof: proof.prove_equal(run_states, gradient=gradient))

    def prove_itself(self, run_states: StatesFunction, *, gradient: bool = False) -> None:
        """Show, on two short rows, that ``run_states`` computes what this very model does: it may have been changed."""
        prove_equal_briefly(self.model, run_states, gradient=gradient)

    def gives_own_logits(self, run_logits: LogitsFunction) -> bool:
        """Return True if ``run_logits`` computes the model's own logits: those of its kind, and its very own."""
        try:
            self._prove(lambda proof: proof.prove_own_logits(run_logits))
            prove_own_logits_briefly(self.model, run_logits)
        except NotProven:
            return False
        return True

    def holds(self, prove: Callable[[], None]) -> bool:
        """Return True if one of the proofs can be made."""
        try:
            prove()
        except NotProven:
            return False
        return True

    def _prove(self, prove: Callable[[PerturbationProof], None]) -> None:
        """Make a proof; where it fails, again in double precision: then it was rounding that a model magnified."""
        proof = find_proof(self.model)
        try:
            prove(proof)
        except NotProven as reason:
            try:
                with NoSinglePrecision():
                    prove(proof.in_double)
            except Exception:  # the first reason, whatever a model's code makes of double precision
                raise reason from None

    def agrees(self, run_states: StatesFunction) -> bool:
        """Return True if ``run_states`` computes what the model itself does, on two short rows."""
        return self.holds(lambda: self.prove_itself(run_states))


_PROOFS: OrderedDict[tuple[type, str], PerturbationProof] = OrderedDict()  # the last few: learner and engine share one


def find_proof(model: PreTrainedModel) -> PerturbationProof:
    """Return the proof for models of this class and these settings, made on their miniature once.

    Where the class makes no miniature, the proof is made on the model itself, if it has no long windows.

    Raises:
        NotTestable: no miniature can be made, and the model's windows are longer than the proof's rows.
    """
    key = type(model), model.config.to_json_string(use_diff=False)
    if key not in _PROOFS:
        proof = PerturbationProof(_choose_subject(model))
        if proof.model is model:  # whose weights change
            return proof
        _PROOFS[key] = proof
        while len(_PROOFS) > 4:
            _PROOFS.popitem(last=False)
    return _PROOFS[key]


def _choose_subject(model: PreTrainedModel) -> PreTrainedModel:
    try:
        return build_miniature(model)
    except Exception as error:  # whatever its class makes of settings that no checkpoint has
        if (longest := find_longest_window(model.config)) > TRUNK // 2:
            why = f"windows of {longest} tokens, of which no small copy can be made to try ({summarize_error(error)})"
            raise NotTestable(f"it has {why}") from None
        return model
