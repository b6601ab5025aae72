"""The base of every section of settings."""

from __future__ import annotations

from typing import Any

import pydantic

from agentrl.settings.catalogue import is_shared
from agentrl.settings.signature import refuse_bool


class Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants")

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _read_value(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Refuse true and false for a number, where pydantic would read 1 and 0; read ``none``, as TOML has no null."""
        field = cls.model_fields[str(info.field_name)]
        return None if value == "none" and is_shared(field) else refuse_bool(value, field.annotation)
