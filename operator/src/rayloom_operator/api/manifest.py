"""Reads a manifest file: YAML with exactly one document, an LLMService."""

from __future__ import annotations

from pathlib import Path

import yaml

from rayloom_operator.api.spec import KIND, LLMService, parse
from rayloom_operator.errors import SpecError


class _Loader(yaml.SafeLoader):
    """Loads times and dates as text, as kubectl does. kubectl sends JSON, which has no types for them.

    PyYAML reads 12:30 as a number with the base 60, and kubectl reads it as text.
    """

    def whole_number(self, node: yaml.ScalarNode) -> int | str:
        return str(node.value) if ":" in node.value else self.construct_yaml_int(node)

    def number(self, node: yaml.ScalarNode) -> float | str:
        return str(node.value) if ":" in node.value else self.construct_yaml_float(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.whole_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.number)

_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_service(path: Path) -> LLMService:
    """Reads the LLMService in a YAML file.

    Raises SpecError if the file cannot be read, or is not YAML. Also raises SpecError if the file contains anything
    besides one LLMService, so that no document of a user is silently ignored.
    """
    try:
        text = path.read_text(encoding="utf-8")
        documents = [each for each in yaml.load_all(text, Loader=_Loader) if each is not None]
    except OSError as error:
        raise SpecError((f"cannot read {path}: {error.strerror}",)) from error
    except UnicodeDecodeError as error:
        raise SpecError((f"{path} is not UTF-8 text: {error.reason} at byte {error.start}",)) from error
    except yaml.YAMLError as error:
        raise SpecError((f"{path} is not YAML: {' '.join(str(error).split())}",)) from error
    if not documents:
        raise SpecError((f"{path} is empty; it must hold one {KIND}",))
    if len(documents) > 1:
        kinds = ", ".join(str((isinstance(each, dict) and each.get("kind")) or "no kind") for each in documents)
        raise SpecError(
            (f"{path} holds {len(documents)} documents ({kinds}); keep exactly one {KIND} and remove the others",)
        )
    return parse(documents[0])
