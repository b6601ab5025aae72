"""A reward model: a sequence classifier with one output, request for many episodes at once.

Episodes end at any time. A request waits for the pass that is running, if there is one, and then goes with all others
that have come meanwhile: batches grow with the load, and no request waits for a batch to fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import isfinite
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread

from agentrl.errors import UserError
from agentrl.models.hub import explain_load_errors
from agentrl.types import Message

if TYPE_CHECKING:
    from agentrl.renderer.template import TemplateRenderer

Text = str | Sequence[Message]


class RewardModel:
    """Scores conversations, or plain texts. Also a reward function in TRL's form, async.

    Conversations are rendered by the model's own chat template; nothing in a text becomes a control token.

    Args:
        model: a folder, a name on the model hub, or a loaded ``AutoModelForSequenceClassification``.
        tokenizer: that of the model's name by default.
        batch_size: texts in one pass.
        max_length: tokens of a text; the first ones are left out of a longer one. The model's limit by default.
    """

    per_episode = True  # it gathers texts by itself

    def __init__(
        self, model: Any, tokenizer: Any = None, *, batch_size: int = 32, max_length: int | None = None
    ) -> None:
        self._given, self._tokenizer = model, tokenizer
        source = model if isinstance(model, str) else str(getattr(model.config, "_name_or_path", "")) or "reward_model"
        self.source, self.__name__ = source, PurePath(source).name
        self._batch_size, self._max_length = batch_size, max_length
        self._waiting: list[_ScoreRequest] = []
        self._turn = anyio.Lock()

    async def __call__(self, prompts: Sequence[Text], completions: Sequence[Text], **_: Any) -> list[float]:
        """Score each completion to its prompt: strings, or lists of messages."""
        scores = [0.0] * len(prompts)

        async def one(index: int, prompt: Text, completion: Text) -> None:
            whole = prompt + completion if isinstance(prompt, str) else [*prompt, *completion]  # type: ignore[operator]
            scores[index] = await self.score(whole)

        async with anyio.create_task_group() as tasks:
            for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
                tasks.start_soon(one, index, prompt, completion)
        return scores

    async def score(self, text: Text) -> float:
        """Score a conversation, or a plain text, by the model's output.

        Raises:
            UserError: the model cannot be loaded, or its output is no number.
        """
        request = _ScoreRequest(text)
        self._waiting.append(request)
        await anyio.lowlevel.checkpoint()  # requests of the same moment join this pass
        async with self._turn:
            while request.score is None:
                await to_thread.run_sync(self._pass)
        if not isfinite(request.score):
            raise UserError(f"reward model {self.source!r} gave {request.score} for {str(text)!r:.80}")
        return request.score

    async def load(self) -> None:
        """Load the model now, instead of with the first score. Raises UserError."""
        async with self._turn:
            await to_thread.run_sync(lambda: self._loaded)

    # -- in a thread, one at a time ----------------------------------------------------------------------------------

    def _pass(self) -> None:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        model, renderer = self._loaded
        batch, self._waiting = self._waiting[: self._batch_size], self._waiting[self._batch_size :]
        rows = [torch.tensor(self._encoded(request.text, renderer)) for request in batch]
        ids = pad_sequence(rows, batch_first=True)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        model.config.get_text_config().pad_token_id = pad = self._pad(rows)
        ids = ids.masked_fill(mask == 0, pad)
        with torch.inference_mode():
            logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits
        for request, score in zip(batch, logits[:, 0].float().tolist(), strict=True):
            request.score = score

    def _pad(self, rows: Sequence[Any]) -> int:
        """Choose a padding token that ends no row: the model reads the last token that is not padding."""
        last = {int(row[-1]) for row in rows}
        tokenizer = self._tokenizer
        known = [t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id) if t is not None and t not in last]
        return int(known[0]) if known else next(t for t in range(len(last) + 1) if t not in last)

    def _encoded(self, text: Text, renderer: TemplateRenderer | None) -> list[int]:
        if isinstance(text, str):
            ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        elif renderer is None:
            raise UserError(f"reward model {self.source!r} has no chat template; give it prompts that are strings")
        else:
            ids = renderer.render_closed_ids(text)
        limit = self._max_length or getattr(self._loaded[0].config.get_text_config(), "max_position_embeddings", None)
        kept: list[int] = ids[-limit:] if limit else ids
        if not kept:
            raise UserError(f"reward model {self.source!r} was given no text")
        return kept

    @cached_property
    def _loaded(self) -> tuple[Any, TemplateRenderer | None]:
        from agentrl.renderer.template import TemplateRenderer

        model = self._given if not isinstance(self._given, str) else _classifier(self._given)
        if model.config.num_labels != 1:
            raise UserError(f"reward model {self.source!r} has {model.config.num_labels} outputs; it must have one")
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self.source)
        renderer = TemplateRenderer(self._tokenizer) if self._tokenizer.chat_template else None
        return model.eval(), renderer


class _ScoreRequest:
    """A text that waits for its score."""

    def __init__(self, text: Text) -> None:
        self.text, self.score = text, None  # type: Text, float | None


def _classifier(name: str) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification

    with explain_load_errors(f"reward model {name!r}"):
        model, report = AutoModelForSequenceClassification.from_pretrained(
            name, output_loading_info=True, trust_remote_code=False, use_safetensors=True
        )
    if missing := sorted(report["missing_keys"]):
        raise UserError(f"reward model {name!r} is not trained as one: its folder has no {missing[0]}")
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    with explain_load_errors(f"the tokenizer of reward model {name!r}", "; give RewardModel(model, tokenizer)"):
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
