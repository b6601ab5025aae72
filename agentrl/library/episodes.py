"""The episodes of a run that a query matches, read from its files as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Self, overload

import pyarrow as pa

from agentrl.errors import UserError
from agentrl.runs.reader import EpisodeId, build_trajectory, read_row, read_rows
from agentrl.types import Trajectory
from agentrl.view.index import Column


@dataclass(frozen=True)
class Episodes(Sequence[Trajectory]):
    """Stored episodes in an order; ``ids`` are their names, as `agentrl explain` and `agentrl replay` take them.

    The length is known at once. A trajectory is read as it is asked for; an iteration reads a step's at once.
    """

    folder: Path
    ids: Sequence[EpisodeId]

    @classmethod
    def of(cls, folder: Path, table: pa.Table, rows: Column) -> Self:
        """Take the episodes of some rows of the index."""
        selected = table.select(["split", "step", "row"]).take(pa.array(rows, pa.int64())).to_pylist()
        return cls(folder, [EpisodeId(r["split"], r["step"], r["row"]) for r in selected])

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Trajectory | Self:
        if isinstance(index, slice):
            return type(self)(self.folder, self.ids[index])
        return build_trajectory(read_row(self.folder, self.ids[index]))

    def __iter__(self) -> Iterator[Trajectory]:
        for (split, step), ids in groupby(self.ids, key=lambda name: (name.split, name.step)):
            rows = [name.row for name in ids]
            if len(rows) == 1:
                yield build_trajectory(read_row(self.folder, EpisodeId(split, step, rows[0])))
                continue
            wanted, path = set(rows), self.folder / "trajectories" / f"{split}-{step:06d}.parquet"
            damaged: dict[int, str] = {}
            by_row = {i: build_trajectory(row) for i, row in read_rows(path, left_out=damaged) if i in wanted}
            for row in rows:
                if row in damaged:
                    raise UserError(f"{EpisodeId(split, step, row)} is damaged: {damaged[row]}")
                yield by_row[row]

    def __repr__(self) -> str:
        return f"<{len(self)} episodes of {self.folder}>"
