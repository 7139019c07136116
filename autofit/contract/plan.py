"""A plan: one value for each technique. Frozen, hashable, JSON both ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

Value = int | str


class Plan(Mapping[str, Value]):
    """One value per technique, by the technique's name; immutable and hashable."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Plan):
            return self._values == other._values
        return dict(self) == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __repr__(self) -> str:
        return f"Plan({self.words()})"

    def replaced(self, **values: Value) -> Plan:
        """The same plan with some values put in place of others."""
        return Plan({**self._values, **values})

    def words(self) -> str:
        """The plan on one line, for people and logs."""
        return " ".join(f"{name}={value}" for name, value in self._values.items())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        values = core_schema.dict_schema(
            core_schema.str_schema(),
            core_schema.union_schema([core_schema.int_schema(strict=True), core_schema.str_schema(strict=True)]),
        )
        return core_schema.no_info_after_validator_function(
            lambda raw: raw if isinstance(raw, Plan) else Plan(raw),
            core_schema.union_schema([core_schema.is_instance_schema(cls), values]),
            serialization=core_schema.plain_serializer_function_ser_schema(dict),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}
