"""A section of the configuration."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from gapo_megatron.config.metadata import Role


class Section(BaseModel):
    """Section of a config; each setting has the section's role, or another in its annotation."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    role: ClassVar[Role]
    """Role of every setting whose annotation has no other."""
    kept: ClassVar[str] = "this version does not know it"
    """Why a branch must keep the values of the run that it left, where it must."""

    @classmethod
    def roles(cls) -> dict[str, Role]:
        """The role of each setting."""
        return {
            name: next((one for one in field.metadata if isinstance(one, Role)), cls.role)
            for name, field in cls.model_fields.items()
        }
