"""The capabilities of a model: rows trained side by side, shared prefixes, the embedded engine's cache.

The learner's shared prefixes and the embedded engine's cache replace a model's attention. That is right only where
nothing else mixes positions and where attention is told all that its masks say. It is proven by perturbation
(`agentrl.models.perturbation`), on the model's miniature (`agentrl.models.miniature`), in float32, over rows longer
than every window and chunk; and again, briefly, on the model itself, which may have been changed since its class was
written.
"""

from __future__ import annotations

from collections import OrderedDict

from transformers import PreTrainedModel

from agentrl.models.lm_head import NotProven
from agentrl.models.miniature import build_miniature, find_longest_window
from agentrl.models.perturbation import (
    TRUNK,
    PerturbationProof,
    StatesFunction,
    prove_equal_briefly,
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
        find_proof(self.model).prove_causal()

    def prove_kind(self, run_states: StatesFunction, *, gradient: bool = False) -> None:
        """Show that ``run_states`` computes what models of this class and these settings do.

        Args:
            gradient: compare gradients too.
        """
        proof = find_proof(self.model)
        proof.prove_attention_mixes_alone()
        proof.prove_equal(run_states, gradient=gradient)

    def prove_itself(self, run_states: StatesFunction, *, gradient: bool = False) -> None:
        """Show, on two short rows, that ``run_states`` computes what this very model does: it may have been changed."""
        prove_equal_briefly(self.model, run_states, gradient=gradient)

    def agrees(self, run_states: StatesFunction) -> bool:
        """Return True if ``run_states`` computes what the model itself does, on two short rows."""
        try:
            self.prove_itself(run_states)
        except NotProven:
            return False
        return True


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
