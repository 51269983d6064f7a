"""Requests mean the same in JSON and in YAML, and answers are decoded into the fields of a shape."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rayloom_operator.kube import shapes
from rayloom_operator.kube.codec import decoded, encoded

# Lone surrogates are not valid text. In YAML, control characters below a blank need escapes, as in JSON.
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT)
def test_an_apply_means_the_same_as_yaml_and_as_json(text):
    body = {"message": f"a {text} b"}
    assert json.loads(encoded(body)) == body
    assert yaml.safe_load(encoded(body).decode()) == body


@pytest.mark.parametrize(
    "text", ["\x7f", "a \x85 b", "\x9f", "a \u2028 b", "\ufeff", "\uffff", "\U0001f600", "\x00", "é"]
)
def test_characters_that_yaml_would_refuse_or_lose_arrive(text):
    assert yaml.safe_load(encoded([text]).decode()) == [text]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"7",
        b'{"metadata": 7}',
        b'{"spec": {"volumes": [{}]}}',
        b'{"metadata": {"name": "\xff"}}',
        b'"\\ud800"',
    ],
)
def test_an_answer_of_another_type_is_refused(text):
    with pytest.raises(ValueError):
        decoded(text, shapes.PodFields)


def test_a_null_is_left_out_where_the_shape_has_no_place_for_it():
    text = b'{"metadata": {"name": "a", "labels": null, "ownerReferences": [null, {"uid": "u", "kind": null}]}}'
    assert decoded(text, shapes.PodFields) == {"metadata": {"name": "a", "ownerReferences": [{"uid": "u"}]}}
