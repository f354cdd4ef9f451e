"""Errors of functions of Python, in the words of the command line."""

import re

from shardopt.core import format_error

REMEDIES = {
    r"JAX_NUM_CPU_DEVICES=": "--devices ",
    r"memory_every": "--memory-every",
    r"top_k must": "--top-k must",
    r"leave step out": "leave --step out",
    r"choose a folder that you may": "choose a --run-dir that you may",
    r"give more text, or choose shorter windows": "give more --data, or a smaller --length",
    r"choose chips divisible": "choose --chips divisible",
    r", or describe (it|the chip) with so\.planning\.\w+": "",
    r"pass compiled.as_text.*": "give a file that holds one, as compiled.as_text() makes it.",
    r", pad the dim, or change the rule": " in --mesh",
    r"name the leaves whose first dim counts experts.*": "leave expert out of --mesh.",
    r"use so.hybrid, or make the mesh with": "choose --strategy hybrid, or a --mesh with",
    r"use a length that it divides, with.*": "choose a --length that it divides.",
    r"num_chunks=1": "another --schedule",
    r"another pipeline size or number of chunks.*": "or another --mesh or --schedule.",
    r"targets has": "--lora-targets has",
    r"weights with targets, leave.*": "weights with --lora-targets, and leave vectors out.",
    r"out of targets, or save.*": "out of --lora-targets.",
    r"folder that save wrote": "folder of adapters that tune --lora-rank or peft wrote",
    r"load the frozen parameters that they were.*": (
        "name their model with --model, and its form in training with --base."
    ),
    r"pass family=.*": "take a model of a family that docs/howto/open_weights.md lists.",
    r"give a folder of Hugging Face,": "download the model, and name its folder,",
    r", and -100 for targets that are to be ignored": "",
    r"pass the folder that was given to.*": "name the folder of a run that has saved a checkpoint.",
    r"does not fit opt:": "does not fit the options:",
    r"build opt .*": "leave out --optimizer and --clip, or start another run.",
}
"""Words of functions of Python, to their end of the line where they end with `.*`, and the words of
the command line in their place.
"""


def error_of_command(error: BaseException, command: str) -> str:
    """Return the message of an error, under the name of the command that the user called."""
    if isinstance(error, OSError) and error.filename:
        problem = f"{error.filename}: {error.strerror}."
        return format_error(command, problem, fix="check the path, or name another.")
    text = str(error) or type(error).__name__
    for words, words_of_command in REMEDIES.items():
        text = re.sub(words, words_of_command, text)
    # `launch` reads the words of train and tune, and their errors keep the name
    return re.sub(r"^(?!train|tune)[\w.]+: ", f"{command}: ", text)
