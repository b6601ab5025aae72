"""search-qa: questions whose answer must be looked up, and looked up again with what was found."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentrl_tools.search import Search
from anyio import to_thread

from agentrl import ContractError, Message, ToolCall, ToolEnv, Trajectory, UserError
from agentrl.errors import NoExpertError, suggest
from agentrl.types import ExpertTurn, Observation
from agentrl_envs import dataset, search_qa_tasks
from agentrl_envs.rewards import extract_boxed, is_same_answer

OPENED = 0.15  # of the pages that its search has found, the expert opens all the same
NOT_SHOWN = "A search does not show the page."
ANSWERS = ("The answer is \\boxed{{{}}}.", "\\boxed{{{}}}")

Questions = Mapping[str, Sequence[dataset.Row]]


class SearchQA(ToolEnv):
    r"""Questions over a made-up world, or over a corpus of one's own; the answer goes in ``\boxed{}``.

    Args:
        hops: how many pages an answer may be away: some of 1, 2 and 3.
        world: which made-up world; another number has other names and facts.
        size: how many times 2,360 pages it has.
        k: how many results a search has.
        corpus: one's own, made by ``agentrl index``, instead of the world.
        questions: for it: JSON lines with ``question`` and ``answer``, a text or a list of texts that are right.
        test_questions: for evaluation; without them the last tenth of ``questions`` (256 at most) is held out.
    """

    system_prompt = search_qa_tasks.SYSTEM_PROMPT
    max_turns = 8

    def __init__(
        self,
        hops: Sequence[int] = search_qa_tasks.HOPS,
        world: int = 0,
        size: int = 1,
        k: int = 3,
        corpus: str | Path | None = None,
        questions: str | Path | None = None,
        test_questions: str | Path | None = None,
    ) -> None:
        super().__init__()
        if (corpus is None) != (questions is None) or (test_questions is not None and questions is None):
            raise ContractError("env 'search-qa': corpus and questions go together; test_questions may be added")
        if not 1 <= size <= search_qa_tasks.MAX_SIZE:
            raise ContractError(f"env 'search-qa': size is 1 to {search_qa_tasks.MAX_SIZE}, not {size}")
        self.hops, self.world, self.size = tuple(hops), world, size
        self.tools = (Search(corpus or search_qa_tasks.SearchWorld(world, size), k=k),)

    @classmethod
    @asynccontextmanager
    async def open_shared(cls, **settings: Any) -> AsyncIterator[Questions | None]:
        """Load one's own questions by split."""
        if (given := settings.get("questions")) is None:
            yield None
            return
        rows = await to_thread.run_sync(_rows, given)
        if (test := settings.get("test_questions")) is not None:
            yield {"train": rows, "test": await to_thread.run_sync(_rows, test)}
            return
        held = min(256, max(1, len(rows) // 10))
        if held >= len(rows):
            raise UserError(f"env.questions has {len(rows)} row; two are the least, one of which is held out")
        yield {"train": rows[:-held], "test": rows[-held:]}

    def count(self, split: str) -> int | None:
        return len(self.shared[split]) if self.shared else None

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        split = (options or {}).get("split", "train")
        if self.shared:
            row = self.shared[split][seed % len(self.shared[split])]
            self.answers = [row["answer"]] if isinstance(row["answer"], str | int | float) else row["answer"]
            return self.ask(row["question"]), {"expected": " | ".join(map(str, self.answers))}
        try:
            task = search_qa_tasks.draw(seed, split=split, hops=self.hops, world=self.world, size=self.size)
        except ValueError as error:
            raise ContractError(f"env 'search-qa': {error}") from None
        self.task, self.answers, self.read = task, [task.answer], 0
        return self.ask(task.question), {"hops": len(task.path), "expected": task.answer}

    async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
        """Find page after page, by a search or by its title; answer what the last one says.

        Of a corpus of one's own nobody knows which pages lead to an answer.
        """
        if self.shared:
            raise NoExpertError("the expert of env 'search-qa' knows its made-up worlds, and not env.corpus")
        rng, task = random.Random(self.task.question), self.task
        while self.read < len(task.path):
            page, read = task.path[self.read], self.read
            found = yield ToolCall.of("search", query=page)
            if not _shows(found, page) or (self.read == read and rng.random() < OPENED):
                yield ToolCall.of("open_page", title_or_id=page)
            self.read = read + 1
        yield rng.choice(ANSWERS).format(task.answer)

    async def summarize(self, messages: list[Message]) -> str:
        """Ask what is left to find once the page that was just read is known; or say the answer."""
        task = self.task
        if not _shows(messages, task.path[self.read]):
            return f"{task.questions[self.read]} {NOT_SHOWN}"
        self.read += 1
        return task.questions[self.read] if self.read < len(task.path) else f"The answer is {task.answer}."

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        answer = extract_boxed(trajectory.answer)
        return {"correct": float(answer is not None and any(_same(answer, str(a)) for a in self.answers))}


def _shows(messages: Sequence[Message], page: str) -> bool:
    """Return True if a tool's messages hold the page, and not only mention it."""
    return any(f"{page} {verb} " in message["content"] for message in messages for verb in ("is", "was"))


def _same(answer: str, wanted: str) -> bool:
    """Compare as numbers, or as words: upper case, articles and punctuation do not matter."""
    return is_same_answer(answer, wanted) or (_words(answer) == _words(wanted) != [])


def _words(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.casefold()) if word not in ("a", "an", "the")]


def _rows(path: str | Path) -> Sequence[dataset.Row]:
    rows = dataset.load_rows(Path(path))
    for number, row in enumerate(rows, 1):
        for name in ("question", "answer"):
            if name not in row:
                raise UserError(f"{path}, row {number}: there is no {name!r}{suggest(name, row)}")
        answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        if not isinstance(row["question"], str) or not answers:
            raise UserError(f"{path}, row {number}: a question is a text, and has an answer")
        if not all(isinstance(a, str | int | float) and str(a).strip() for a in answers):
            raise UserError(f"{path}, row {number}: an answer is a text or a number, not {row['answer']!r:.60}")
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows
