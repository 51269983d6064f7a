"""ChatTemplate: the model's own Jinja template. Renders as transformers does, but in a sandbox and within limits.

A template comes with the model's files, so it is not trusted: `template_sandbox` limits its computing time and its
output. The limits stop accidents and known attacks. Still, do not serve a model of a malicious author.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.exceptions import SecurityError

from rayloom_engine.errors import ModelError, RequestError
from rayloom_engine.text.messages import plain_messages
from rayloom_engine.text.template_sandbox import Budget, TemplateSandbox, TemplateTooSlow, spending
from rayloom_engine.text.tokenizer import read_settings
from rayloom_engine.text.tools.calls_in_messages import with_text_arguments

MAX_RANGE_ITEMS = 100_000  # limit for the elements of all ranges in one rendering, counted together
MAX_ADDED_CHARS = 1_000_000  # the most characters that a prompt may have beyond the messages' own text
# After a slow rendering, this many renderings run in a thread. So at most one rendering in a hundred delays the
# streams.
RENDERINGS_AS_SLOW = 100
# seconds of CPU time; a thousand times the time that templates of known models take for a long conversation
MAX_CPU_S = 2.0

# A text behind the last message, which shows where that message ends in a prompt. It is random, so that no client can
# write it.
_MARK = f"end-{secrets.token_hex(16)}"

# Exceptions that a template's code may raise for a message of an unexpected form.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


class ChatTemplate:
    """A compiled template. Safe for use from several threads."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        clock: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        """`special_tokens`: bos_token, eos_token, ... -> text. Raises ModelError if `source` is not a template."""
        environment = TemplateSandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.add_filter("tojson", _to_json)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: clock().strftime(format)
        self.source = source
        # the template for requests with tools; None: this template is for all requests
        self.with_tools: ChatTemplate | None = None
        self._special_tokens = dict(special_tokens)
        self._num_slow_left = 0
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
            raise ModelError(f"the model's chat template cannot be compiled: {error}") from error

    @classmethod
    def load(cls, folder: Path, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """Returns the template of a model folder, from chat_template.jinja, else from tokenizer_config.json.

        Returns None if the folder has no template. Raises ModelError if the template cannot be used.
        """
        path = folder / "chat_template.jinja"
        if path.exists():
            try:
                return cls(path.read_text(encoding="utf-8"), special_tokens)
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"{path} cannot be read as UTF-8 text: {error}") from error
        source = read_settings(folder).get("chat_template")
        with_tools = None
        if isinstance(source, list):  # several named templates
            named = _named(source, folder)
            source = named.get("default")
            with_tools = named.get("tool_use")
        if source is None:
            return None
        if not isinstance(source, str):
            raise ModelError(
                f"{folder}/tokenizer_config.json: chat_template is {type(source).__name__}; "
                "it must be a string, or a list of objects with `name` and `template`"
            )
        template = cls(source, special_tokens)
        if isinstance(with_tools, str):
            template.with_tools = cls(with_tools, special_tokens)
        return template

    @property
    def is_slow(self) -> bool:
        """True if the template should be rendered in a thread, so that streams do not wait for it."""
        return self._num_slow_left > 0

    def was_slow(self) -> None:
        """Records a slow rendering: the next RENDERINGS_AS_SLOW renderings run in a thread.

        After these, renderings run on the event loop again, because one odd conversation says little about others.
        """
        self._num_slow_left = RENDERINGS_AS_SLOW

    def was_rendered_apart(self) -> None:
        """Counts a rendering that ran in a thread."""
        self._num_slow_left = max(0, self._num_slow_left - 1)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
        text_arguments: bool = False,
        cpu_s: float = MAX_CPU_S,
    ) -> str:
        """Returns the prompt for `messages`. `extra` (chat_template_kwargs): further variables for the template.

        `text_arguments`: the template gets the arguments of tool calls as JSON text instead of objects.
        `continue_final_message`: the prompt ends inside the last message. Raises RequestError if the template refuses
        the messages or computes for MAX_CPU_S. Raises TemplateTooSlow after `cpu_s`, if `cpu_s` is less than MAX_CPU_S.
        """
        plain = plain_messages(messages)
        if text_arguments:
            plain = with_text_arguments(plain)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; set one to false",
                "continue_final_message",
            )
        names = {
            **self._special_tokens,
            "tools": list(tools) or None,
            "documents": None,
            **(extra or {}),
            "add_generation_prompt": add_generation_prompt,
        }
        room = sum(len(message["content"]) for message in plain) * 4 + MAX_ADDED_CHARS
        template = self._template if self.with_tools is None or not tools else self.with_tools._template
        end = -1
        try:
            with spending(Budget(cpu_s, room)):
                prompt = _rendered(template, names, plain, room)
                if continue_final_message:
                    end = _end_of_final_message(template, names, plain, room)
        except _TEMPLATE_ERRORS as error:
            if isinstance(error, TemplateTooSlow) and cpu_s < MAX_CPU_S:
                raise
            raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error
        return _cut_after_final_message(prompt, plain[-1]["content"], end) if continue_final_message else prompt


class _RangeBudget:
    """Replaces `range` in one rendering. All loops share its budget, so nested loops end, too."""

    def __init__(self) -> None:
        self._left = MAX_RANGE_ITEMS

    def __call__(self, *bounds: int) -> range:
        items = range(*bounds)
        self._left -= len(items)
        if self._left < 0:
            raise SecurityError(f"it loops over more than {MAX_RANGE_ITEMS} numbers")
        return items


class _Generation(jinja2.ext.Extension):
    """Renders the body of `{% generation %}` unchanged. The tag marks an assistant's answer for training."""

    tags = {"generation"}  # noqa: RUF012 - declared by jinja as an instance's attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _named(templates: list[Any], folder: Path) -> dict[Any, Any]:
    try:
        return {item["name"]: item["template"] for item in templates}
    except (TypeError, LookupError) as error:
        raise ModelError(
            f"{folder}/tokenizer_config.json: each entry of chat_template must be an object with `name` and `template`"
        ) from error


def _rendered(template: jinja2.Template, names: Mapping[str, Any], messages: list[dict[str, Any]], room: int) -> str:
    """Returns what the template writes for `messages`, at most `room` characters. `names`: its other variables."""
    pieces: list[str] = []
    for piece in template.generate({**names, "messages": messages, "range": _RangeBudget()}):
        pieces.append(piece)
        room -= len(piece)
        if room < 0:
            raise SecurityError("it writes far more text than the messages have")
    return "".join(pieces)


def _end_of_final_message(
    template: jinja2.Template, names: Mapping[str, Any], messages: list[dict[str, Any]], room: int
) -> int:
    """Returns the position in the prompt at which the last message's text ends; -1 if it cannot be found.

    The template may write the same text again behind the message. So the template renders the message with a mark.
    """
    *earlier, last = messages
    marked = {**last, "content": last["content"].rstrip() + _MARK}
    try:
        return _rendered(template, names, [*earlier, marked], room).rfind(_MARK)
    except TemplateTooSlow:
        raise
    except _TEMPLATE_ERRORS:  # the template accepts the message only without the mark
        return -1


def _cut_after_final_message(prompt: str, content: str, last_end: int) -> str:
    """Returns the prompt up to the end of its last message's text. `last_end`: where it may end; -1: not known."""
    final = content.strip()
    start = prompt.rfind(final) if final else -1
    if final and last_end >= 0 and prompt.endswith(final, 0, last_end):
        start = last_end - len(final)
    if start < 0:
        raise RequestError(
            "continue_final_message needs a last message whose text the chat template keeps", "continue_final_message"
        )
    end = start + len(final)
    # The blanks at the message's end are kept if the template kept them.
    kept = content[content.rfind(final) + len(final) :]
    return prompt[: end + len(kept)] if prompt.startswith(kept, end) else prompt[:end]


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Replaces Jinja's own tojson, which escapes HTML and so would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
