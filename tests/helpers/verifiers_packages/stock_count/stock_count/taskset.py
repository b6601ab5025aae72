"""stock-count: the answer is in the store, which is asked through a tool (multi-turn)."""

from typing import Literal

import verifiers.v1 as vf

from stock_count.servers.store import STOCK, StoreToolset

HELD_OUT = ("locks", "hooks")


class StockCountData(vf.TaskData):
    answer: str


class StockCountTask(vf.Task[StockCountData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or "").split())

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class StockCountConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class StockCountTaskset(vf.Taskset[StockCountTask, StockCountConfig]):
    @classmethod
    def toolsets(cls, config: StockCountConfig) -> list[vf.Toolset]:
        return [StoreToolset(config.tools)]

    def load(self) -> list[StockCountTask]:
        held = self.config.split == "test"
        things = [thing for thing in STOCK if (thing in HELD_OUT) == held]
        return [
            StockCountTask(
                StockCountData(idx=i, prompt=f"How many {thing} are there?", answer=str(STOCK[thing])),
                self.config.task,
            )
            for i, thing in enumerate(things)
        ]
