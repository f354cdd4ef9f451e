"""Conversations as training data: read from JSONL, written by the chat template of a model, and
turned into its tokens.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardopt.core._errors import calling, error_text, plural, value_error
from shardopt.core._extras import require
from shardopt.data._chat_template import ChatTemplate, Message, compile_template, special_tokens_of
from shardopt.data._corpus import Batch

if TYPE_CHECKING:
    import os

    import tokenizers

_TOKENIZER, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


class Chat(NamedTuple):
    """A conversation.

    Attributes:
      messages: "role" and "content" of each message.
      place: where it was read, such as "chat.jsonl line 3".
    """

    messages: Sequence[Message]
    place: str = "the conversation"


class ChatTokenizer(NamedTuple):
    """The tokenizer and the chat template of a model.

    Attributes:
      tokenizer: the tokenizer, of the package tokenizers.
      template: the chat template.
    """

    tokenizer: "tokenizers.Tokenizer"
    template: ChatTemplate

    def tokens(self, messages: Sequence[Message]) -> Batch:
        """Return the tokens of a conversation, and which of them the assistant writes.

        Args:
          messages: "role" and "content" of each message.

        Returns:
          A document for `pack`: "tokens", int32 [n], and "weights", float32 [n]: 1 for the
          assistant's tokens, else 0.

        Raises:
          ValueError: if the template refuses the messages, or if no token is the assistant's.
        """
        text, spans = self.template.render(messages)
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        weights = np.zeros(len(encoding.ids), np.float32)
        if spans:
            begins, ends = np.transpose(encoding.offsets)
            for begin, end in spans:
                weights[(ends > begin) & (begins < end)] = 1
        if not weights[1:].any():
            raise ValueError("no token is written by the assistant")
        return {"tokens": np.asarray(encoding.ids, np.int32), "weights": weights}


@calling("open_chat")
def open_chat(
    folder: "str | os.PathLike[str]", *, template: "str | os.PathLike[str] | None" = None
) -> ChatTokenizer:
    """Read the tokenizer and the chat template of a folder of Hugging Face.

    No code of the folder runs.

    The template runs in jinja's sandbox, with the functions that transformers gives to templates.

    Args:
      folder: a folder with tokenizer.json. The template is in chat_template.jinja or in
        tokenizer_config.json.
      template: a file with another template.

    Returns:
      A `ChatTokenizer`.

    Raises:
      FileNotFoundError: if tokenizer.json or the template is missing.
      ModuleNotFoundError: if tokenizers or jinja2 is not installed.
      ValueError: if a file is damaged, or a special token is not in the tokenizer.

    Example:
      >>> import json, pathlib, tempfile, tokenizers
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> words = {word: i for i, word in enumerate(["<user>", "<assistant>", "hello", "there"])}
      >>> tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
      >>> tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
      >>> tokenizer.save(str(folder / "tokenizer.json"))
      >>> source = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
      >>> source += "{% if add_generation_prompt %}<assistant> {% endif %}"
      >>> _ = (folder / "chat_template.jinja").write_text(source)
      >>> messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello there"}]
      >>> document = open_chat(folder).tokens(messages)
      >>> document["tokens"].tolist(), document["weights"].tolist()
      ([0, 2, 1, 2, 3], [0.0, 0.0, 0.0, 1.0, 1.0])

    **The assistant's tokens**: what a template writes between {% generation %} and {% endgeneration
    %}. In a template without these, a message of the assistant begins where the template asks the
    assistant to write (`add_generation_prompt`). It ends where the text of the messages up to it
    ends, so the token that ends the turn counts. The text of the first messages must be the
    beginning of the whole text; another template is refused.

    A token that is partly in such a piece counts, as in transformers.
    """
    require("tokenizers", extra="huggingface")
    import tokenizers

    folder = Path(folder)
    if not (folder / _TOKENIZER).is_file():
        problem = f"{folder} has no {_TOKENIZER}."
        fix = (
            "download it too; for a model with tokenizer.model alone, save it once by transformers'"
            " AutoTokenizer."
        )
        raise FileNotFoundError(error_text(problem, fix=fix))
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / _TOKENIZER))
    except Exception as error:  # the package raises no narrower class
        problem = f"{folder / _TOKENIZER} cannot be read: {error}."
        raise value_error(problem, fix="download the file again.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _read_json(folder / _SETTINGS)
    special_tokens = special_tokens_of(_read_json(folder / "special_tokens_map.json") | settings)
    unknown = sorted(
        f"{name}: {token!r}"
        for name, token in special_tokens.items()
        if token and tokenizer.token_to_id(token) is None
    )
    if unknown:
        problem = (
            f"{plural(len(unknown), 'special token')} of {folder / _SETTINGS} is not in"
            f" {_TOKENIZER}."
        )
        raise value_error(problem, unknown, "save the tokenizer again by transformers.")
    source, origin = _template_source(folder, settings, template)
    return ChatTokenizer(tokenizer, compile_template(source, special_tokens, origin))


def _template_source(
    folder: Path, settings: Mapping[str, Any], template: "str | os.PathLike[str] | None"
) -> tuple[str, Path]:
    """Return the text of the template and the file that it is in."""
    path = folder / _TEMPLATE if template is None else Path(template)
    if path.is_file():
        return path.read_text(encoding="utf-8"), path
    if template is not None:
        fix = "name a jinja file with a chat template."
        raise FileNotFoundError(error_text(f"{path} is no file.", fix=fix))
    source = settings.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        problem = (
            f"{folder} has no chat template: neither {_TEMPLATE}, nor 'chat_template' in"
            f" {_SETTINGS}."
        )
        fix = "use a model that was made for conversations, or write a template and name its file."
        raise FileNotFoundError(error_text(problem, fix=fix))
    return source, folder / _SETTINGS


def _read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file, or nothing if there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        problem = f"{path} is no JSON: {error}."
        raise value_error(problem, fix="download the file again.") from error
    return content if isinstance(content, dict) else {}


@calling("read_chats")
def read_chats(path: "str | os.PathLike[str]") -> list[Chat]:
    r"""Read conversations from a file of JSON lines; empty lines are skipped.

    A line is `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content":
    "..."}]}`. Or it is `{"prompt": "...", "completion": "..."}`, which is a message of the user and
    an answer of the assistant.

    Args:
      path: the file.

    Raises:
      OSError: if the file cannot be read.
      ValueError: if a line has another form, or no message of the assistant; the message names the
        lines.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "chat.jsonl")
      >>> _ = path.write_text('{"prompt": "2 + 2?", "completion": "4"}\n')
      >>> read_chats(path)[0].messages
      [{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '4'}]
    """
    path, chats, problems = Path(path), [], []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise value_error(f"{path} is no UTF-8: {error}.") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                chats.append(Chat(_messages_of(line), f"{path.name} line {number}"))
            except ValueError as error:
                problems.append(f"line {number}: {error}")
    if problems:
        fix = (
            'write {"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ...,'
            ' "completion": ...} in each line.'
        )
        problem = f"{plural(len(problems), 'line')} of {path} cannot be used."
        raise value_error(problem, problems, fix)
    if not chats:
        raise value_error(f"{path} has no conversations.", fix="write one in each line.")
    return chats


def _messages_of(line: str) -> list[dict[str, str]]:
    """Return the messages of a line.

    Raises:
      ValueError: if the line has another form.
    """
    try:
        row = json.loads(line)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from None
    _check_type("", row, dict)
    if row.keys() == {"prompt", "completion"}:
        for name, text in row.items():
            _check_type(f"{name!r} ", text, str)
        return [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
    if row.keys() != {"messages"}:
        unknown = sorted(row.keys() - {"messages", "prompt", "completion"})
        keys = ", ".join(map(repr, unknown or row)) or "no keys"
        raise ValueError(f"has {keys}, must have 'messages' alone, or 'prompt' and 'completion'")
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"'messages' is {_kind(messages)}, must be a list of messages")
    for i, message in enumerate(messages, 1):
        _check_message(f"message {i}", message)
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError("has no message of the assistant")
    return messages


def _check_message(place: str, message: Any) -> None:
    _check_type(f"{place} ", message, dict)
    if unknown := sorted(message.keys() - {"role", "content"}):
        names = ", ".join(map(repr, unknown))
        raise ValueError(f"{place} has {names}, must have 'role' and 'content' alone")
    for name in ("role", "content"):
        _check_type(f"{name!r} of {place} ", message.get(name), str)


_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    type(None): "missing or null",
}


def _kind(value: object) -> str:
    return "an empty list" if value == [] else _KINDS.get(type(value), "a number")


def _check_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name}is {_kind(value)}, must be {_KINDS[kind]}")


class TokenizedChats(NamedTuple):
    """Conversations as documents for `pack`.

    Attributes:
      documents: the documents that fit into a row.
      num_too_long: how many were left out, since they are longer than a row.
      longest: tokens of the longest conversation.
    """

    documents: list[Batch]
    num_too_long: int
    longest: int


@calling("tokenize_chats")
def tokenize_chats(
    chats: Iterable[Chat], tokenizer: ChatTokenizer, length: int, vocab_size: int
) -> TokenizedChats:
    """Return conversations as documents.

    A conversation of more than `length` tokens is left out and counted.

    Args:
      chats: the conversations.
      tokenizer: the tokenizer and the template of the model.
      length: positions of a row.
      vocab_size: token ids that the model knows.

    Raises:
      ValueError: if the template refuses a conversation, no token is the assistant's, a token is
        not known to the model, or no conversation fits into a row.
    """
    documents, problems, longest = [], [], 0
    for chat in chats:
        try:
            document = tokenizer.tokens(chat.messages)
        except ValueError as error:
            problems.append(f"{chat.place}: {error}")
            continue
        largest = int(document["tokens"].max())
        if largest >= vocab_size:
            problems.append(f"{chat.place}: token {largest}, and the model knows {vocab_size}")
        longest = max(longest, len(document["tokens"]))
        documents.append(document)
    if problems:
        problem = f"{plural(len(problems), 'conversation')} cannot be trained on."
        fix = (
            "change these lines; or name a template that can write them, with {% generation %}"
            " around what the assistant writes."
        )
        raise value_error(problem, problems, fix)
    fitting = [document for document in documents if len(document["tokens"]) <= length]
    if not fitting:
        problem = (
            f"all {plural(len(documents), 'conversation')} have more than {length} tokens; the"
            f" longest has {longest}."
        )
        fix = "choose a larger length, or shorter conversations."
        raise value_error(problem, fix=fix)
    return TokenizedChats(fitting, len(documents) - len(fitting), longest)
