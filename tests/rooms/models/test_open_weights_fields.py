"""Each field of each family's config.json is changed or left out. The logits equal transformers, or
the folder is refused.
"""

import json

import jax
import numpy as np
import pytest
from support import config_fields, oracle

from shardopt.models import decoder, from_pretrained
from shardopt.models._families import FAMILIES

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


logits_of = jax.jit(decoder.logits_of, static_argnums=0)


@pytest.mark.parametrize("name", oracle.CASES)
def test_a_changed_field_changes_the_logits_as_in_transformers_or_is_refused(name, tmp_path):
    pytest.importorskip("transformers").logging.set_verbosity_error()
    config = config_fields.full_config(oracle.read_case(name)[0])
    reference = config_fields.Theirs(tmp_path)
    computed = {}
    problems = []
    num_equal = 0
    for field, value in config_fields.changes_of(config):
        changed = {key: entry for key, entry in config.items() if key != field}
        changed |= {} if value is config_fields.ABSENT else {field: value}
        folder, expected = reference.logits(changed)
        if expected is None:
            continue
        try:
            model = from_pretrained(folder)
        except ValueError:
            continue
        program = repr(model.config), tuple(model.places)
        if program not in computed:
            tokens = oracle.TOKENS[: oracle.SHOWN, :-1]
            computed[program] = logits_of(model.config, model.load_params(progress=False), tokens)
        error = float(np.abs(computed[program] - expected).max() / max(1, np.abs(expected).max()))
        num_equal += error <= 1e-5
        if error > 1e-5:
            problems.append(
                f"{field}={'absent' if value is config_fields.ABSENT else value}: {error:.2g}"
            )
    assert not problems, problems
    assert num_equal >= 20


def test_every_other_type_of_transformers_is_refused_by_its_name(tmp_path):
    pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES

    assert len(TYPES) > 100
    assert {name for name, _ in oracle.CASES.values()} == FAMILIES.keys()
    for name in TYPES.keys() - FAMILIES.keys():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
        with pytest.raises(ValueError, match=f"has model_type '{name}', which "):
            from_pretrained(tmp_path)
