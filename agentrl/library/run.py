"""A run as an object: its metrics, episodes, summary, report and model. Reading it loads no torch; its model does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import UserError
from agentrl.evaluation.scope import read_scope
from agentrl.library.episodes import Episodes
from agentrl.library.run_html import format_run
from agentrl.settings.documents import read_json
from agentrl.settings.load import LoadConfig
from agentrl.settings.registry import check_package
from agentrl.settings.trust import read_run_layer
from agentrl.view.evaluation_findings import describe_scope
from agentrl.view.report import write_report
from agentrl.view.search import EpisodeSearch
from agentrl.view.store import open_runs

if TYPE_CHECKING:
    from pandas import DataFrame
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from agentrl.models.policy import Policy

Metrics = Mapping[str, float | None]


class Run:
    """A run: what `agentrl.train` returns, or a run folder that is opened, an evaluation's too.

    What a run that goes on has written since is there at the next look.

    Args:
        folder: a run folder, such as ``runs/last``.
        policy: the model and the tokenizer, where they are in memory.

    Raises:
        UserError: there is no run, or there are several.
    """

    folder: Path  # absolute

    def __init__(self, folder: str | PathLike[str], policy: Policy | None = None) -> None:
        stores = open_runs([str(Path(folder))])
        if len(stores) > 1:
            raise UserError(f"{str(folder)!r} holds {len(stores)} runs; open one: {str(stores[-1].folder)!r}")
        self._store = stores[0]
        self._store.folder = self.folder = self._store.folder.resolve()  # runs/last may lead elsewhere later
        if policy is not None:
            self._policy = policy

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the settings, as config.toml has them."""
        return self._store.config

    @property
    def metrics(self) -> list[Metrics]:
        """List the rows of metrics.jsonl: one for each step, and one for each evaluation, whose names are ``eval/...``.

        A number that was not finite is None. A line that cannot be read is left out, with a warning.
        """
        self._store.metrics.refresh()
        if count := self._store.metrics.unreadable:
            warnings.warn(
                f"{count} line{'s' * (count != 1)} of {self._store.metrics.path} cannot be read", stacklevel=2
            )
        return list(self._store.metrics.lines)

    @property
    def history(self) -> DataFrame:
        """Return the metrics as a DataFrame of pandas: a row for each step, with the evaluation of its policy.

        Of two evaluations after the last step the first is there: with ``run.load_best`` the second is that of the best
        policy, which an earlier step left; ``evaluations`` has both.

        Raises:
            UserError: pandas is not installed.
        """
        check_package("Run.history", "pandas", "notebook")
        import pandas

        rows: dict[float | None, dict[str, float | None]] = {}
        lines = self.metrics
        for row in reversed(lines) if describe_scope(self.folder) else lines:  # an evaluation's last line is the whole
            rows[row["step"]] = {**row, **rows.get(row["step"], {})}
        steps = [rows[step] for step in sorted(rows, key=lambda step: step or 0)]
        return pandas.DataFrame(steps, columns=None if steps else ["step"]).set_index("step")

    @property
    def evaluations(self) -> list[Metrics]:
        """List the evaluations in order: ``step``, ``reward``, ``reward_low`` ... of the policy after that step."""
        rows = [row for row in self.metrics if any(name.startswith("eval/") for name in row)]
        if describe_scope(self.folder):
            rows = rows[-1:]  # each line before is a part of the last
        return [{name.removeprefix("eval/"): value for name, value in row.items()} for row in rows]

    @property
    def summary(self) -> dict[str, Any]:
        """Return what summary.json holds: the rewards before and after, the costs, where everything is.

        Raises:
            UserError: the run has not ended, or the file cannot be read.
        """
        try:
            summary = read_json(self.folder / "summary.json")
            if not isinstance(summary, dict):
                raise ValueError("it is no object")
        except FileNotFoundError:
            raise UserError(
                f"the run in {str(self.folder)!r} has no summary: it goes on, or was killed; run.metrics has its "
                f"steps, and agentrl train --resume {self.folder} resumes it"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{self.folder / 'summary.json'} cannot be read: {error}") from None
        return summary

    def episodes(self, query: str = "", sort: str = "") -> Episodes:
        """Find episodes by a query, such as ``reward<1 tool=calculator``; each is read as it is asked for.

        Those of a file that cannot be read are left out, with a warning.

        Args:
            query: as in the search box of ``agentrl view``; all episodes by default.
            sort: the name of a number, ``-`` before it for the highest first; by default the newest step is first.

        Raises:
            UserError: the query or the order cannot be read; the sentence names the term.
        """
        self._store.refresh()
        for name, why in sorted(self._store.problems.items()):
            warnings.warn(f"trajectories/{name} cannot be read: {why}", stacklevel=2)
        snapshot, rows = EpisodeSearch(self._store).rows(query, sort)
        return Episodes.of(self.folder, snapshot.table, rows)

    def report(self, out: str | PathLike[str] | None = None) -> Path:
        """Write the report as one HTML file, ``report.html`` in the folder by default, and return its path.

        Raises:
            UserError: the run has no step yet, or the file cannot be written.
        """
        self._store.refresh()
        return write_report(self._store, Path(out) if out else self.folder / "report.html")

    @property
    def model(self) -> PreTrainedModel | PeftModel:
        """Return the trained model; of a run that was opened it is loaded. An evaluation's is the one evaluated.

        Raises:
            UserError: the run has no model, or it cannot be loaded.
        """
        return self._policy.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer. Raises UserError as ``model`` does."""
        return self._policy.tokenizer

    @cached_property
    def _policy(self) -> Policy:
        from agentrl.models.policy import load_policy  # brings torch

        setting = self._store.setting
        load = LoadConfig(
            **{name: setting(f"load.{name}", field.default) for name, field in LoadConfig.model_fields.items()}
        )
        if load.trust_remote_code:
            read_run_layer(self.folder, {})  # refuses what a stranger's folder asks for
        name = self._model_name()
        if name != setting("model"):
            load = load.model_copy(update={"revision": None})  # the trained model is here
        return load_policy(name, setting("dtype", "float32"), setting("lora.quantize"), load)

    def _model_name(self) -> str:
        """Return the name that the model is loaded by."""
        scope = read_scope(self.folder)
        if scope is None:
            if not (self.folder / "model").exists():
                raise UserError(
                    f"the run in {str(self.folder)!r} has no model: it goes on, or was killed; agentrl train --resume "
                    f"{self.folder} resumes it"
                )
            return str(self.folder)
        if scope.endpoint:
            raise UserError(f"the evaluation in {str(self.folder)!r} was of a model at {scope.endpoint}, and has none")
        return str(self._store.setting("model"))

    def __repr__(self) -> str:
        return f"<Run {self.folder}: {', '.join(self._describe())}>"

    def _repr_html_(self) -> str:
        self._store.metrics.refresh()
        return format_run(self._store, self._describe())

    def _describe(self) -> Iterator[str]:
        """Yield what the run is, how far it is, and its rewards."""
        self._store.metrics.refresh()
        setting, series = self._store.setting, self._store.metrics.series
        yield from (str(setting(name)) for name in ("env.name", "model") if setting(name) is not None)
        steps, _ = series("policy_version")
        evaluates = describe_scope(self.folder)
        yield evaluates or f"{steps[-1] if steps else 0} of {setting('steps', '?')} steps"
        if not self._store.ended:
            yield "not ended"
        _, rewards = series("eval/reward")
        shown: Sequence[float] = rewards[-1:] if evaluates or len(rewards) < 2 else (rewards[0], rewards[-1])
        if shown:
            yield "held-out reward " + " -> ".join(f"{reward:.3f}" for reward in shown)
