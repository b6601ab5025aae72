"""reverse-word: write a word backwards (single-turn), scored on the trace alone."""

from difflib import SequenceMatcher

import verifiers.v1 as vf

SYLLABLES = ("ba", "do", "ki", "lu", "me", "no")


class ReverseWordData(vf.TaskData):
    answer: str
    """The word of the prompt, backwards."""


class ReverseWordTask(vf.Task[ReverseWordData]):
    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def likeness(self, trace: vf.Trace) -> float:
        return SequenceMatcher(None, (trace.last_reply or "").strip(), self.data.answer).ratio()

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") <= 20)

    @vf.metric
    async def reply_length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class ReverseWordConfig(vf.TasksetConfig):
    num_tasks: int = 30


class ReverseWordTaskset(vf.Taskset[ReverseWordTask, ReverseWordConfig]):
    def load(self) -> list[ReverseWordTask]:
        words = [a + b for a in SYLLABLES for b in SYLLABLES][: self.config.num_tasks]
        return [
            ReverseWordTask(
                ReverseWordData(idx=i, prompt=word, system_prompt="Write the word backwards.", answer=word[::-1]),
                self.config.task,
            )
            for i, word in enumerate(words)
        ]
