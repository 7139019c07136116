"""No file of the core names a technique, but for those that the global batch is made of."""

import ast
import re
from pathlib import Path

import pytest

import autofit
from autofit.registry import technique, techniques
from tests.support.synthetic import cpu_facts, cuda_facts

CORE = Path(autofit.__file__).parent
SPLIT = {"parallel", "micro_batch", "accumulation"}
NAMES = {one.name for one in techniques()} - SPLIT
VALUES = {
    str(choice.value)
    for one in techniques()
    for facts in (cpu_facts(), cuda_facts())
    for choice in one.choices(facts)
    if one.name not in SPLIT
}
DTYPES = {"fp32", "tf32", "bf16", "fp16", "fp8"}
"""What a device computes in; the catalogue of cards and the rates have them as their own words."""
WORDS = {"none", "off", "on", "default", "model", "full", "int8", "activations", "parameters"}
"""Values that are words of many meanings."""
ALLOWED = {
    "optimizer": "the last part of a step: a phase of a trial, a part of a trace",
    "attention": "a kind of work in the roofline, a fact of the model (what transformers picks)",
    "loader": "which of a script's loaders it trains on: a key of recorded facts",
}
FACTS_OF_THE_MODEL = {
    ("machine/model.py", "eager"),
    ("machine/model.py", "sdpa"),
    ("machine/model.py", "flash_attention_2"),
    ("machine/model.py", "flash_attention_3"),
    ("machine/model.py", "flex_attention"),
    ("machine/model.py", "liger"),
    ("contract/facts.py", "eager"),
    ("contract/facts.py", "sdpa"),
}
"""What transformers says of a model's class, by the names that transformers has; they stand in recorded facts."""


def named(source):
    """The strings and keywords of a module that a technique or a value is called by; docstrings are left out."""
    tree = ast.parse(source)
    loose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in loose:
            yield from re.findall(r"\b(\w+)=", node.value)
            yield node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "replaced":
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)


def found(path):
    words = (NAMES | VALUES) - DTYPES - WORDS - set(ALLOWED)
    name = path.relative_to(CORE).as_posix()
    return {word for word in named(path.read_text("utf-8")) if word in words and (name, word) not in FACTS_OF_THE_MODEL}


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: path.relative_to(CORE).as_posix())
def test_the_core_names_no_technique(path):
    assert found(path) == set()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('plan.replaced(checkpointing="full")', {"checkpointing"}),
        ('technique("kernels")', {"kernels"}),
        ('x = "write it like --fix offload=none"', {"offload"}),
        ('if value == "chunked_ce": pass', {"chunked_ce"}),
        ('"""Of checkpointing and offload=none."""', set()),
        ('plan["micro_batch"]', set()),
    ],
)
def test_a_name_is_found_where_it_stands(source, words):
    assert set(named(source)) & (NAMES | VALUES) - WORDS == words


def test_the_exceptions_are_needed():
    read = {path.relative_to(CORE).as_posix(): set(named(path.read_text("utf-8"))) for path in CORE.rglob("*.py")}
    everything = set().union(*read.values())
    assert set(ALLOWED) <= everything
    for name, word in FACTS_OF_THE_MODEL:
        assert word in read[name], f"{name} no longer says {word}"


def test_a_technique_lists_the_packages_that_it_looks_for():
    for one in techniques():
        for facts in (cpu_facts(), cuda_facts()):
            for choice in one.choices(facts):
                for package in re.findall(r"pip install (?:-U )?(\S+)", choice.reason):
                    assert package in one.packages
    with pytest.raises(KeyError):
        technique("adapter").lacks(cpu_facts(), "nobody's")
