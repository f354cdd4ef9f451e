"""A name, or a call of it with keyword arguments, as people type it."""

import ast
from typing import Any


def read_call(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments in "adamw" or "adamw(b2=0.99, nesterov=True)".

    Raises:
      ValueError: if it is neither a name nor a call with literal keyword arguments; the message is for the caller to
        write.

    Example:
      >>> read_call("top_k(density=0.05)")
      ('top_k', {'density': 0.05})
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if call.args or not all(keyword.arg for keyword in call.keywords):
            raise ValueError
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except SyntaxError:
        raise ValueError from None
    return ast.unparse(call.func), arguments
