"""Chat templates in the forms of open models, and folders with a small tokenizer for them.

[[ and ]] stand for the marks around what the assistant writes, which most published templates do
not have."""

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}\
[[{{ message['content'] + '<|im_end|>\\n' }}]]{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nThe year is " + strftime_now("%Y") + ".\\n" }}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        [[- {{- message['content'] | trim + '<|eot_id|>' }}-]]
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\\n' }}{% if role == 'model' %}[[{{ message['content'] | trim + '<end_of_turn>\\n' }}]]\
{% else %}{{ message['content'] | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

MISTRAL = """{%- set state = namespace(index=0) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] not in ["user", "assistant"] %}
        {%- continue %}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- set state.index = state.index + 1 %}
    {%- else %}
        [[- {{- " " + message["content"] | trim + eos_token }}-]]
    {%- endif %}
{%- endfor %}
"""

THINKING = """{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' and loop.last %}\
<think>\n\n</think>\n\n{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
"""As Qwen 3: the last answer is written in another way than earlier ones."""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TOKENS = [
    *SPECIAL.values(),
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
]
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "what is 2 + 2? it is 4.",
    "system user assistant model",
] * 3


def marked(template):
    """The template with {% generation %} around what the assistant writes."""
    pairs = {
        "[[-": "{%- generation %}",
        "-]]": "{%- endgeneration %}",
        "[[": "{% generation %}",
        "]]": "{% endgeneration %}",
    }
    for mark, tag in pairs.items():
        template = template.replace(mark, tag)
    return template


def plain(template):
    """The template without marks."""
    for mark in ("[[-", "-]]", "[[", "]]"):
        template = template.replace(mark, "")
    return template


def make_tokenizer(kind="bpe", vocab_size=320):
    """A tokenizer that is trained here: bytes that are merged, or words."""
    if kind == "words":
        tokenizer = tokenizers.Tokenizer(models.WordLevel(unk_token="<pad>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(special_tokens=TOKENS)
    else:
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=TOKENS, initial_alphabet=alphabet
        )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_tokenizer(folder, template, kind="bpe"):
    """Write the files of a tokenizer, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(kind).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL | {"chat_template": template}))
    return folder


def chat(*contents, system=None):
    """Messages of the user and the assistant in turn."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return messages + [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)
    ]
