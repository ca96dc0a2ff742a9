"""docs/api.md lists every public name, and nothing else."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]


spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
make_api = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_api)


def test_the_api_page_is_what_the_public_names_say():
    assert make_api.PAGE.read_text(encoding="utf-8") == make_api.page(), "run `python docs/make_api.py`"


def test_first_sentences_are_told_from_abbreviations():
    assert make_api.first_sentence("Uses X, e.g. The one. And more.") == "Uses X, e.g. The one."
    assert make_api.first_sentence("As in Yu et al., 2022. More.") == "As in Yu et al., 2022."
