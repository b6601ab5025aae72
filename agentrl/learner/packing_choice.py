"""The choice of how a policy's rows are packed: the plain way, or shared prefixes where those are proven."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from agentrl.learner.distributed import ProcessGroup
from agentrl.learner.hidden_states import (
    PACKINGS,
    PADDED,
    PREFIX,
    Packing,
    choose_plain_packing,
    prove_prefix_sharing,
)
from agentrl.models.lm_head import LmHead, NotProven, know_backbone, locate_backbone, unwrap_model

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class FirstProcessEnded(Exception):
    """The first process ended by an error, which it tells."""


@dataclass
class PackingChoice:
    """A packing of a policy's rows: the one that is plainly right, and the one that was chosen.

    Args:
        plain: the packing that is right for the model, without shared prefixes.
        lm_head: from hidden states to logits.
        why_plain: why it is one that computes prefixes again; empty where it is not.
        chosen: None: not yet known.
    """

    plain: Packing
    lm_head: Callable[[Tensor], Tensor]
    why_plain: str = ""
    chosen: Packing | None = None

    @classmethod
    def agree(cls, policy: PreTrainedModel | PeftModel, wanted: str, group: ProcessGroup) -> PackingChoice:
        """Let rank 0, which has the weights, choose the plain packing for all, and prove the head.

        Args:
            wanted: ``learner.packing``.

        Raises:
            FirstProcessEnded: it did not come to that.
        """
        model = unwrap_model(policy)
        if not group.is_worker:
            packing, why = choose_plain_packing(policy)
            head = packing.build_head(policy)
            own = (head.scale, head.cap) if isinstance(head, LmHead) else None
            place = locate_backbone(model) if own else None
            group.broadcast((packing.name, own, place, why))
        else:
            if (told := group.receive()) is None:
                raise FirstProcessEnded
            name, own, place, why = told
            packing = PACKINGS[name]
            if own is not None:
                know_backbone(model, place)
            head = packing.build_head(policy) if own is None else LmHead(model.get_output_embeddings(), *own)
        known = packing is not PADDED or wanted == PADDED.name
        return cls(packing, head, why, packing if known else None)

    def prove(self, policy: PreTrainedModel | PeftModel) -> None:
        """Find out whether shared prefixes give the same numbers with this policy, which is whole."""
        try:
            prove_prefix_sharing(policy)
            self.chosen = PREFIX
        except NotProven as reason:
            self.chosen = self.plain
            warnings.warn(
                f"{type(policy).__name__}: the prefixes that rows share are computed for each of them "
                f'(learner.packing = "padded"): {reason}',
                stacklevel=2,
            )

    def move_head(self, policy: PreTrainedModel | PeftModel) -> None:
        """Let the head be another policy's: the shards'."""
        if isinstance(self.lm_head, LmHead):
            self.lm_head = replace(self.lm_head, layer=unwrap_model(policy).get_output_embeddings())
