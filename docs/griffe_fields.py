"""For the API pages: explanations of fields, examples as blocks of code, and shapes as they are written."""

import ast
import importlib
import re
from typing import Any

import griffe

from jmarl import configs


class Docstrings(griffe.Extension):
    """Fields of configs are explained by the comments behind them, as `jmarl.configs.explain` does."""

    def on_node(self, *, node: Any, **_: Any) -> None:
        """Called before griffe reads a node: shapes such as "T *batch" are not the product that griffe would print."""
        for part in ast.walk(node) if isinstance(node, ast.FunctionDef | ast.AnnAssign) else ():
            if (
                isinstance(part, ast.Constant)
                and isinstance(part.value, str)
                and re.fullmatch(r"\w+( \*\w+)+", part.value)
            ):
                part.value = part.value.replace("*", "∗")  # noqa: RUF001  (no operator, so it stays a string)

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called for each object that griffe has read."""
        if obj.docstring is not None:
            obj.docstring.value = with_fences(obj.docstring.value)

    def on_class_members(self, *, cls: Any, **_: Any) -> None:
        """Called for each class that griffe has read, with its fields."""
        if not any(str(decorator.value) in ("config", "configs.config") for decorator in cls.decorators):
            return
        runtime = getattr(importlib.import_module(cls.module.canonical_path), cls.name)
        meanings = configs.explain(runtime)
        for name, member in cls.members.items():
            if member.is_attribute and member.docstring is None and meanings.get(name):
                member.docstring = griffe.Docstring(f"{meanings[name]}.", parent=member)


def with_fences(text: str) -> str:
    """A docstring whose examples at its margin, up to an empty line, are blocks of code."""
    return re.sub(r"(?:^|(?<=\n))>>> .*(?:\n.+)*", lambda match: f"```pycon\n{match[0]}\n```", text)
