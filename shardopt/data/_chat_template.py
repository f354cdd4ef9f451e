"""The chat template of a folder of Hugging Face: jinja in a sandbox, with the pieces of text that
the assistant writes.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from shardopt.core._errors import error_text, value_error
from shardopt.core._extras import require

if TYPE_CHECKING:
    import jinja2.nodes

Message = Mapping[str, str]
Spans = list[tuple[int, int]]

_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Around the text of {% generation %} blocks while a template runs. Unicode keeps both for the
inside of a program.
"""

_OLDEST_JINJA = (3, 1, 6)
"""Older versions have known ways out of the sandbox."""


class ChatTemplate(NamedTuple):
    """A compiled template.

    Attributes:
      template: the template.
      marked: whether it marks the text of the assistant by {% generation %}.
      special_tokens: what the template can read, such as "bos_token".
    """

    template: "jinja2.Template"
    marked: bool
    special_tokens: Mapping[str, str]

    def render(self, messages: Sequence[Message]) -> tuple[str, Spans]:
        """Return the text of a conversation, and (begin, end) of each piece that the assistant
        writes.

        Raises:
          ValueError: if the template refuses the messages, or does not say where the assistant
            writes.
        """
        if any(mark in message["content"] for message in messages for mark in (_BEGIN, _END)):
            raise ValueError(
                "a message has a character that Unicode keeps for programs, U+FDD0 or U+FDD1"
            )
        if self.marked:
            return _without_marks(self._text(messages))
        return self._text(messages), self._spans_of_prefixes(messages)

    def _spans_of_prefixes(self, messages: Sequence[Message]) -> Spans:
        """Return the spans from the texts of the first messages: each must be the beginning of the
        whole text.

        A message of the assistant begins where the template asks the assistant to write, and ends
        where the text of the messages up to it ends.
        """
        text, spans = self._text(messages), []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:i], add_generation_prompt=True)
            after = text if i + 1 == len(messages) else self._text(messages[: i + 1])
            if not (text.startswith(after) and after.startswith(before)):
                at = f"message {i + 1} of {len(messages)}"
                if i + 1 == len(messages):
                    at = "the last message"
                raise ValueError(
                    f"the template has no {{% generation %}}, and writes {at} in another way when"
                    " others follow or precede, so the tokens of the assistant are not known"
                )
            spans.append((len(before), len(after)))
        return spans

    def _text(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        import jinja2

        names = {
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
        }
        try:
            return self.template.render(
                **self.special_tokens, **names, add_generation_prompt=add_generation_prompt
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses it: {error}") from error
        except Exception as error:  # whatever the code of a template can do
            raise ValueError(f"the chat template fails: {type(error).__name__}: {error}") from error


def compile_template(
    source: str, special_tokens: Mapping[str, str | None], origin: object
) -> ChatTemplate:
    """Compile a template in the sandbox of transformers: it can read what it is given, and nothing
    else.

    Args:
      source: the text of the template.
      special_tokens: the special tokens by name; None is a token that the model does not have.
      origin: where the template was found, for messages.

    Raises:
      ModuleNotFoundError: if jinja2 is not installed.
      ValueError: if the template is no jinja, or reads a special token that is not given.
    """
    require("jinja2", extra="huggingface")
    import jinja2.nodes
    from jinja2 import meta

    version = tuple(int(part) for part in jinja2.__version__.split(".")[:3])
    if version < _OLDEST_JINJA:
        problem = f"jinja2 {jinja2.__version__} has known ways out of its sandbox."
        raise ModuleNotFoundError(
            error_text(problem, fix="pip install -U 'jinja2>=3.1.6'"), name="jinja2"
        )
    environment = _sandbox()
    try:
        syntax = environment.parse(source)
        template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        problem = (
            f"the chat template in {origin} is no jinja: line {error.lineno}: {error.message}."
        )
        raise value_error(problem, fix="download the file again.") from error
    used_tokens = meta.find_undeclared_variables(syntax) & set(_SPECIAL_TOKENS)
    unknown = sorted(used_tokens - special_tokens.keys())
    if unknown:
        problem = (
            f"the chat template in {origin} reads {', '.join(unknown)}, which tokenizer_config.json"
            " does not have."
        )
        raise value_error(problem, fix="add the token, or null if the model has none.")
    marked = any(map(_is_mark, syntax.find_all(jinja2.nodes.CallBlock)))
    known_tokens = {name: token for name, token in special_tokens.items() if token is not None}
    return ChatTemplate(template, marked, known_tokens)


_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def special_tokens_of(settings: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the special tokens in the content of tokenizer_config.json or special_tokens_map.json."""
    tokens = {name: settings[name] for name in _SPECIAL_TOKENS if name in settings}
    return {
        name: token["content"] if isinstance(token, Mapping) else token
        for name, token in tokens.items()
    }


def _is_mark(block: "jinja2.nodes.CallBlock") -> bool:
    import jinja2.nodes

    method = block.call.node
    return isinstance(method, jinja2.nodes.ExtensionAttribute) and method.name == "_marked"


def _without_marks(text: str) -> tuple[str, Spans]:
    """Return the text without marks, and the spans that were between them."""
    spans, begin = [], 0
    pieces = text.replace(_END, _BEGIN).split(_BEGIN)
    for i, piece in enumerate(pieces):
        if i % 2:
            spans.append((begin, begin + len(piece)))
        begin += len(piece)
    return "".join(pieces), spans


def _sandbox() -> "jinja2.Environment":
    """Return the environment that chat templates are written for."""
    import jinja2
    from jinja2 import ext, nodes, sandbox, utils

    class Generation(ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    class PlainNamespace(utils.Namespace):
        """A namespace that cannot store names of Python's own."""

        def __init__(*arguments: Any, **attributes: Any):
            self, *positional = arguments
            values = dict(*positional, **attributes)
            for name in values:
                check_name(name)
            utils.Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            check_name(name)
            super().__setitem__(name, value)

    class PlainDict:
        """`dict` without the attributes of the type."""

        def __call__(self, *arguments: Any, **values: Any) -> dict[Any, Any]:
            return dict(*arguments, **values)

    def check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise sandbox.SecurityError(f"a namespace cannot store {name!r}")  # pyright: ignore[reportPrivateImportUsage]

    def to_json(
        value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "namespace": PlainNamespace,
        "dict": PlainDict(),
    }
    return environment
