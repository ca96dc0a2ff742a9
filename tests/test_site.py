"""The site says what the code does: who sees what, every algorithm and name, links that lead somewhere."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import yaml

import jmarl
from jmarl import configs
from jmarl.cli import own

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def load(name):
    spec = importlib.util.spec_from_file_location(f"jmarl_docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


pages = load("pages")
make_api = load("make_api")
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]


@pytest.mark.parametrize("name", own.ALGORITHMS)
def test_what_the_table_says_a_value_reads_is_what_the_update_reads(name):
    read = pages.reads(name)
    assert ("state" in read) == ("state" in pages.VALUES[name]), pages.VALUES[name]
    assert "act.state" not in read  # no actor reads it
    assert ("action" in read) == (name != "random")
    assert ("reward" in read) == (name != "random")


def test_a_team_is_paid_the_same_for_all_where_the_table_says_so():
    """By the configs; mixers and HAPPO have no reward of each agent's own."""
    rewards = {name: pages.facts(name).reward for name in own.ALGORITHMS}
    of_team = {name for name, reward in rewards.items() if reward != "each agent's own"}
    assert {name for name in own.ALGORITHMS if "_tot" in pages.VALUES[name]} <= of_team
    assert of_team >= {"happo", "haa2c", "mat", "coma"}
    assert of_team.isdisjoint({"ippo", "mappo", "iql", "pqn_iql", "maddpg", "masac", "isac", "iddpg"})
    assert rewards["mat"] == "mean of all" and rewards["qmix"] == "sum of all"


def test_facts_are_those_of_the_code():
    assert pages.facts("mappo").actions == ("discrete", "continuous") and pages.facts("qmix").actions == ("discrete",)
    assert pages.facts("maddpg").learns_from == "replay" and pages.facts("pqn_vdn").learns_from == "rollouts"
    assert pages.facts("happo").sharing == "per_agent" and not pages.facts("mat").has_memory


def test_every_algorithm_is_on_one_page_which_asks_for_its_tables():
    on_pages = [name for family in pages.FAMILIES for name in family.algorithms]
    assert sorted(on_pages) == sorted(own.ALGORITHMS) == sorted(pages.VALUES)
    for family in pages.FAMILIES:
        text = (DOCS / "algorithms" / f"{family.page}.md").read_text(encoding="utf-8")
        for table in ("who-sees-what", "algorithms", "results", *(["defaults"] * (family.page != "random"))):
            assert f"<!-- {table} {' '.join(family.algorithms)} -->" in text, (family.page, table)
        assert all(f"<!-- docstring learners.{module} -->" in text for module in family.modules)


def test_symbols_are_of_fields_that_exist():
    fields = {field for name in own.ALGORITHMS for field in pages.config_class(name).__dataclass_fields__}
    assert set(pages.SYMBOLS) <= fields


def test_defaults_are_those_of_the_config_with_all_fields_explained():
    text = pages.defaults("ippo", "mappo", "ia2c", "maa2c")
    rows = {
        row.split("|")[1].strip(" `"): [cell.strip(" `") for cell in row.split("|")] for row in text.splitlines()[2:]
    }
    assert set(jmarl.A2CConfig.__dataclass_fields__) <= set(rows)
    assert rows["clip_eps"][2:6] == ["ε", "0.2", "0.2", "swept"]
    assert rows["num_epochs"][3:6] == ["4", "1", "static"]
    for name in own.ALGORITHMS:
        assert all(configs.explain(pages.config_class(name)).values()), name


def test_results_are_computed_from_the_committed_series():
    run = next(run for run in pages.runs() if run.name == "vdn-MPE_simple_spread_v3")
    series = run.metrics["eval/return_sum"]
    last = [[x for x in seed if x is not None and x == x][-1] for seed in series]
    row = next(line for line in pages.results("vdn").splitlines() if "results/vdn-MPE_simple_spread_v3/" in line)
    assert f"{sum(last) / len(last):.1f} ({min(last):.1f} to {max(last):.1f})" in row
    assert pages.results("mat").startswith("There is no committed run") or "mat-" in pages.results("mat")


@pytest.mark.parametrize("path", pages.WRITTEN)
def test_tables_in_files_are_those_of_today(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    assert "<!-- begin " in text
    assert text == pages.with_tables(text, path), "run `python docs/pages.py`"
    assert pages.expand(text).count("<!-- begin ") == text.count("<!-- begin ")  # the site leaves them as they are


def test_a_table_says_how_seeds_did_while_exploring_and_with_their_best_parameters():
    run = next(run for run in pages.runs() if run.name == "mappo-rware-tiny-4ag")
    assert (run.score("eval"), run.score("train")) == ("0.6 (0.2 to 1.2)", "7.7 (5.1 to 11.6)")
    assert run._replace(metrics={run.metric: run.metrics[run.metric]}).score("absolute") == pages.EMPTY
    name = "happo-MPE_simple_spread_v3-2e6-4_minibatches"
    assert next(run for run in pages.runs() if run.name == name).title == "happo, 4 minibatches"


def test_a_report_is_shown_as_the_command_prints_it():
    text = pages.reported("*vdn-MPE_simple_spread_v3", "--threshold", "-30", "--interval", "mean")
    assert "**MPE_simple_spread_v3**" in text and "steps to -30" in text and "![" not in text
    assert re.search(r"^\| vdn \| 4 \| 2,000,128 \|", text, re.MULTILINE) and "| pqn_vdn | 4 |" in text


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_directives_have_a_name_and_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    for directive in re.findall(r"^<!-- (.+?) -->$", text, re.MULTILINE):
        assert directive.removeprefix("begin ").split()[0] in {*pages.DIRECTIVES, "end"}, directive
    here = str(path.relative_to(ROOT))
    for link in pages.links(text):
        target = pages.resolve(link, here)
        assert target is None or (ROOT / target).exists(), f"{here} links to {link}"


def test_a_link_that_leads_nowhere_would_be_seen():
    text = "See [this](missing.md#part) and ![that](../x.png).\n\n```python\na[0](b)\n```\n[a site](https://x.y/z)"
    assert pages.links(text) == ["missing.md", "../x.png", "https://x.y/z"]
    assert pages.resolve("../x.png", "docs/a/b.md") == "docs/x.png"
    assert pages.resolve("https://x.y/z", "docs/a.md") is None
    assert "(found#part)" in pages.with_links(text, lambda link: "found") and "a[0](b)" in text


def test_the_menu_has_every_page():
    def leaves(node):
        if isinstance(node, str):
            return [node]
        return [leaf for item in (node.values() if isinstance(node, dict) else node) for leaf in leaves(item)]

    menu = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert {str(path.relative_to(DOCS)) for path in PAGES} <= set(menu)
    assert len(menu) == len(set(menu))


def test_every_public_name_is_on_the_api_pages():
    written = pages.api_pages(make_api)
    text = "\n".join(written.values())
    for module in make_api.public_modules(jmarl):
        for name in make_api.public_names(module):
            path = pages.canonical(module, name)
            on_its_page = re.search(
                rf"(\[`{name}`\]|^## {name}$|^::: {re.escape(path)}$)", written[module.__name__], re.M
            )
            assert on_its_page, f"{module.__name__}.{name}"
            value = getattr(module, name)
            if callable(value):
                assert text.count(f"::: {path}\n") == 1, path
    assert pages.canonical(jmarl, "mat") == "jmarl.learners.mat.mat"  # not the module of that name


def test_docstrings_become_markdown():
    text = pages.of_docstring(
        "What.\n\n    a = b\n    c = d\n\nUnlike it:\n  - one\n    more\n\n"
        "References:\n  X, 2020 (https://a.b/c).\n  Y,\n    2021."
    )
    assert "```text\na = b\nc = d\n```" in text
    assert "Unlike it:\n\n- one\n  more" in text
    assert "- X, 2020 ([a.b/c](https://a.b/c))." in text and text.endswith("- Y, 2021.")


def test_notebooks_keep_code_and_pictures():
    text, pictures = pages.notebook(ROOT / "examples" / "quickstart.ipynb")
    assert len(pictures) == 4 and all(content.startswith(b"\x89PNG") for content in pictures.values())
    assert all(f"]({name})" in text for name in pictures) and "```python" in text
