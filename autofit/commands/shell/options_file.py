"""The YAML of a ``tune.yaml``: a value is the text that stands there, as on the command line."""

from __future__ import annotations

import re
from typing import Any

from yaml import MappingNode, SafeLoader, ScalarNode, SequenceNode, load
from yaml.constructor import ConstructorError


class _AsWritten(SafeLoader):
    """Texts, but for ``true``, ``false`` and nothing: YAML 1.1 makes 8 of 010, 90 of 1:30, and true of ``on``."""

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Values by name; no name twice, since one of its values would be lost."""
        found: dict[Any, Any] = {}
        for name, value in node.value:
            key = name.value.replace("-", "_") if isinstance(name, ScalarNode) else None
            if key is None or key in found:
                words = "a name is no text" if key is None else f"{key} is given twice"
                raise ConstructorError(None, None, words, name.start_mark)
            found[key] = self.construct_object(value, deep=deep)
        return found

    def construct_sequence(self, node: SequenceNode, deep: bool = False) -> list[Any]:
        """Values of knobs, and arguments of a script: it may read ``true`` otherwise than ``True``."""
        texts = [one.value if isinstance(one, ScalarNode) else None for one in node.value]
        return [
            self.construct_object(one, deep=deep) if text is None else text
            for one, text in zip(node.value, texts, strict=True)
        ]


_AsWritten.yaml_implicit_resolvers = {}
_AsWritten.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""])
_AsWritten.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?i:true|false)"), list("tTfF"))


def parse(text: str) -> object:
    """What stands in a file of options: a mapping from names, with ``_`` for ``-``, to texts, lists of them and flags.

    Raises:
        YAMLError: It is no YAML, or names something twice.
    """
    return load(text, _AsWritten)  # noqa: S506 - a SafeLoader
