"""Conversations as tokens: the assistant's tokens are those of transformers, and what cannot be
used is refused by name.
"""

import json
import re

import numpy as np
import pytest
from support import chats

from shardopt import data

pytestmark = pytest.mark.fast

CHATS = {
    "one turn": chats.chat("what is 2 + 2?", "it is 4."),
    "two turns": chats.chat("the quick\nbrown fox?", " jumps over ", "é 😀?", "it is\n\n4."),
    "open end": chats.chat("the dog?", "lazy dog.", "what?"),
}
SYSTEM = chats.chat("what is 2?", "it is.", system="over the lazy dog")
PIECES = {
    "chatml": ["it is 4.<|im_end|>\n"],
    "llama3": ["it is 4.<|eot_id|>"],
    "gemma": ["it is 4.<end_of_turn>\n"],
    "mistral": [" it is 4.</s>"],
}


def opened(folder, template, kind="bpe"):
    return data.open_chat(chats.write_tokenizer(folder, template, kind))


def pieces_of(tokenizer, document):
    """The text of each run of tokens that have weight."""
    edges = np.flatnonzero(np.diff(document["weights"], prepend=0, append=0))
    runs = (document["tokens"][begin:end] for begin, end in edges.reshape(-1, 2))
    return [tokenizer.tokenizer.decode(run.tolist(), skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize("marks", [chats.plain, chats.marked])
@pytest.mark.parametrize("name", chats.TEMPLATES)
def test_the_loss_is_on_what_the_assistant_writes(name, marks, tmp_path):
    tokenizer = opened(tmp_path, marks(chats.TEMPLATES[name]))
    assert tokenizer.template.marked == (marks is chats.marked)
    assert pieces_of(tokenizer, tokenizer.tokens(CHATS["one turn"])) == PIECES[name]
    (open_end,) = pieces_of(tokenizer, tokenizer.tokens(CHATS["open end"]))
    assert "lazy dog." in open_end
    assert "what" not in open_end
    assert len(pieces_of(tokenizer, tokenizer.tokens(CHATS["two turns"]))) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["bpe", "words"])
@pytest.mark.parametrize("name", chats.TEMPLATES)
def test_tokens_and_masks_are_those_of_transformers(name, kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    template = chats.TEMPLATES[name]
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=chats.make_tokenizer(kind),
        chat_template=chats.marked(template),
        **chats.SPECIAL,
    )
    messages = dict(CHATS) if name == "gemma" else CHATS | {"system": SYSTEM}
    for marks in (chats.plain, chats.marked):
        ours = opened(tmp_path / marks.__name__, marks(template), kind)
        for label, conversation in messages.items():
            expected = theirs.apply_chat_template(
                conversation, return_assistant_tokens_mask=True, return_dict=True
            )
            document = ours.tokens(conversation)
            assert document["tokens"].tolist() == expected["input_ids"], label
            assert document["weights"].tolist() == expected["assistant_masks"], label
            assert 0 < sum(expected["assistant_masks"]) < len(expected["input_ids"])


def refusal_of(folder, template, messages):
    """What the tokenizer says of a conversation."""
    tokenizer = opened(folder, template)
    with pytest.raises(ValueError, match=r"\w") as error:
        tokenizer.tokens(messages)
    return str(error.value)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (
            chats.plain(chats.GEMMA),
            SYSTEM,
            "the chat template refuses it: System role not supported",
        ),
        (
            chats.THINKING,
            CHATS["two turns"],
            (
                "the template has no {% generation %}, and writes message 2 of 4 in another way"
                " when others follow or precede, so the tokens of the assistant are not known"
            ),
        ),
        (
            "{{ messages[0].content + 1 }}",
            SYSTEM,
            "the chat template fails: TypeError: can only concatenate str",
        ),
        (
            "{{ ''.__class__.__mro__ }}",
            SYSTEM,
            "the chat template refuses it: access to attribute '__class__' of 'str'",
        ),
        (
            "{{ messages.append(1) }}",
            SYSTEM,
            "the chat template refuses it: access to attribute 'append' of 'list'",
        ),
        (
            "{% set x = namespace(_a=1) %}",
            SYSTEM,
            "the chat template refuses it: a namespace cannot store '_a'",
        ),
        (
            "{% set x = namespace() %}{% set x._a = 1 %}",
            SYSTEM,
            "the chat template refuses it: a namespace cannot store '_a'",
        ),
        ("{% generation %}{% endgeneration %}all", SYSTEM, "no token is written by the assistant"),
        (
            chats.marked(chats.CHATML),
            chats.chat("\ufdd0", "x"),
            "a message has a character that Unicode keeps for programs",
        ),
    ],
)
def test_a_conversation_that_a_template_cannot_write_is_refused(
    template, messages, message, tmp_path
):
    assert refusal_of(tmp_path, template, messages).startswith(message)


def test_the_template_can_use_what_transformers_gives(tmp_path):
    template = (
        "{{ messages | tojson }}{% for m in messages %}{% if m.role == 'user' %}{% continue %}{%"
        " endif %}{% generation %}{{ dict(a=m.content).a }}{% endgeneration %}{% break %}{% endfor"
        " %}{{ tools is none }}"
    )
    text, spans = opened(tmp_path, template).template.render(chats.chat("<é>", "ok"))
    assert (
        text == '[{"role": "user", "content": "<é>"}, {"role": "assistant", "content": "ok"}]okTrue'
    )
    assert [text[begin:end] for begin, end in spans] == ["ok"]


def test_a_template_file_comes_before_the_settings_and_another_before_both(tmp_path):
    folder = chats.write_tokenizer(tmp_path, "old")

    def names(name):
        return {"name": name, "template": name}

    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [names("tool_use"), names("default")]})
    )
    assert data.open_chat(folder).template.render([])[0] == "default"
    (folder / "chat_template.jinja").write_text("file")
    assert data.open_chat(folder).template.render([])[0] == "file"
    (tmp_path / "mine.jinja").write_text("mine")
    assert data.open_chat(folder, template=tmp_path / "mine.jinja").template.render([])[0] == "mine"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda folder: (folder / "tokenizer.json").unlink(),
            FileNotFoundError,
            "open_chat: {folder} has no tokenizer.json.",
        ),
        (
            lambda folder: (folder / "tokenizer.json").write_text("{}"),
            ValueError,
            "open_chat: {folder}/tokenizer.json cannot be read",
        ),
        (
            lambda folder: (folder / "tokenizer_config.json").write_text("{}"),
            FileNotFoundError,
            (
                "open_chat: {folder} has no chat template: neither chat_template.jinja, nor"
                " 'chat_template' in tokenizer_config.json."
            ),
        ),
        (
            lambda folder: (folder / "tokenizer_config.json").write_text(
                '{"chat_template": "x", "eos_token": "<none>"}'
            ),
            ValueError,
            (
                "open_chat: 1 special token of {folder}/tokenizer_config.json is not in"
                " tokenizer.json.\n  eos_token: '<none>'"
            ),
        ),
        (
            lambda folder: (folder / "tokenizer_config.json").write_text(
                '{"chat_template": "{{ bos_token }}"}'
            ),
            ValueError,
            (
                "open_chat: the chat template in {folder}/tokenizer_config.json reads bos_token,"
                " which tokenizer_config.json does not"
            ),
        ),
        (
            lambda folder: (folder / "chat_template.jinja").write_text("{% for x %}"),
            ValueError,
            "open_chat: the chat template in {folder}/chat_template.jinja is no jinja: line 1: ",
        ),
    ],
)
def test_a_folder_without_what_is_needed_is_refused(change, error, message, tmp_path):
    change(chats.write_tokenizer(tmp_path, "{{ messages }}"))
    with pytest.raises(error, match=re.escape(message.format(folder=tmp_path))):
        data.open_chat(tmp_path)


def test_every_bad_line_is_named(tmp_path):
    lines = [
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        "",
        '{"prompt": "a", "completion": "b"}',
        "{'prompt': 1}",
        "[1]",
        '{"messages": [{"role": "user", "content": "a"}], "tools": []}',
        '{"messages": []}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "assistant", "content": "a", "name": "x"}]}',
        '{"prompt": "a", "completion": null}',
        '{"messages": [{"role": "user", "content": "a"}]}',
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match="read_chats: ") as error:
        data.read_chats(path)
    assert (
        str(error.value)
        == f"read_chats: 8 lines of {path} cannot be used.\n  line 4: is no JSON: Expecting"
        " property name enclosed in double quotes: line 1 column 2 (char 1)\n  line 5: is a"
        " list, must be an object\n  line 6: has 'tools', must have 'messages' alone, or"
        " 'prompt' and 'completion'\n  line 7: 'messages' is an empty list, must be a list of"
        " messages\n  line 8: 'content' of message 1 is missing or null, must be a text\n  line"
        " 9: message 1 has 'name', must have 'role' and 'content' alone\n  line 10:"
        " 'completion' is missing or null, must be a text\n  line 11: has no message of the"
        ' assistant\nFix: write {"messages": [{"role": ..., "content": ...}, ...]} or'
        ' {"prompt": ..., "completion": ...} in each line.'
    )
    path.write_text("\n".join(lines[:3]))
    assert [(chat.place, chat.messages) for chat in data.read_chats(path)] == [
        ("chat.jsonl line 1", chats.chat("a", "b")),
        ("chat.jsonl line 3", chats.chat("a", "b")),
    ]


def test_long_conversations_are_counted_and_none_is_cut(tmp_path):
    tokenizer = opened(tmp_path, chats.plain(chats.CHATML))
    conversations = [
        data.Chat(chats.chat("a", "b " * count), f"line {count}") for count in (1, 20, 2, 30)
    ]
    sizes = [len(tokenizer.tokens(chat.messages)["tokens"]) for chat in conversations]
    tokenized = data.tokenize_chats(conversations, tokenizer, sizes[2], 320)
    assert [len(document["tokens"]) for document in tokenized.documents] == [sizes[0], sizes[2]]
    assert (tokenized.num_too_long, tokenized.longest) == (2, sizes[3])
    with pytest.raises(
        ValueError, match=f"all 4 conversations have more than 3 tokens; the longest has {sizes[3]}"
    ):
        data.tokenize_chats(conversations, tokenizer, 3, 320)
    with pytest.raises(ValueError, match=r"line 1: token \d+, and the model knows 100"):
        data.tokenize_chats(conversations, tokenizer, 64, 100)


def test_packed_rows_have_the_weights_of_their_targets(tmp_path):
    tokenizer = opened(tmp_path, chats.plain(chats.CHATML))
    documents = [tokenizer.tokens(messages) for messages in CHATS.values()]
    rows = list(data.pack(documents, 128))
    targets = np.concatenate([row["targets"][row["weights"] > 0] for row in rows])
    expected = np.concatenate(
        [document["tokens"][document["weights"] > 0] for document in documents]
    )
    np.testing.assert_array_equal(np.sort(targets), np.sort(expected))
    with pytest.raises(
        ValueError,
        match=re.escape("a document has tokens of shape (2,) and weights of shape (1,)."),
    ):
        list(data.pack([{"tokens": [1, 2], "weights": [1.0]}], 4))
