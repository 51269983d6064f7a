"""Templates that would hang a server or fill its memory are refused with a sentence within a CPU second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from rayloom_engine.errors import ModelError, RequestError
from rayloom_engine.front.openai import prompts
from rayloom_engine.text import chat_template
from rayloom_engine.text.chat_template import ChatTemplate
from rayloom_engine.text.template_growth import weight
from rayloom_engine.text.template_sandbox import TemplateTooSlow
from rt_front import FrontUnderTest, running_front

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, **options: Any) -> str:
    return ChatTemplate(source, {}).render(USER, **options)


KEPT = "{% set r = range(90000) %}"
LOOPS = {
    "loops over a kept range": "{% set r = range(3000) %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(40) }}",
    "a recursive loop": "{% for a in [range(9)] recursive %}{% for b in range(9) %}{{ loop([range(9)]) }}{% endfor %}"
    "{% endfor %}",
    "filters without loops": KEPT + "{% set x = r | list | sort | unique | list %}" * 300,
    "a filter for each item": KEPT + "{% for a in r %}{% set x = r | map('string') | list %}{% endfor %}",
    "tests for each item": KEPT + "{% for a in r %}{% set x = r | select('odd') | list %}{% endfor %}",
}


@pytest.mark.parametrize("source", LOOPS.values(), ids=LOOPS.keys())
def test_a_template_that_computes_too_long_is_ended(source: str) -> None:
    template = ChatTemplate(source, {})
    started_s = time.thread_time()
    with pytest.raises((TemplateTooSlow, RequestError)):
        template.render(USER, cpu_s=0.1)
    # The time is checked only between filters, and a filter of 90,000 items may take 0.1 s. Without the limit, the
    # template would take over 20 s.
    assert time.thread_time() - started_s < 3.0


LARGE = {
    "percent": "{{ '%999999999d' % 1 }}",
    "percent by an argument": "{{ '%*d' % (999999999, 1) }}",
    "format": "{{ '{:999999999}'.format(1) }}",
    "format by an argument": "{{ '{:{}}'.format(1, 999999999) }}",
    "format_map": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "center": "{{ 'a' | center(2000000000) }}",
    "center method": "{{ 'a'.center(2000000000) }}",
    "mapped center": "{{ ['a'] | map('center', 2000000000) | list }}",
    "ljust": "{{ 'a'.ljust(2000000000) }}",
    "zfill": "{{ 'a'.zfill(2000000000) }}",
    "expandtabs": "{{ '\\t'.expandtabs(2000000000) }}",
    "tojson": "{{ [1] | tojson(indent=2000000000) }}",
    "tojson separators": "{% set s = 'x' * 999999 %}{{ [1, 1] * 999 | tojson(separators=(s, s)) }}",
    "indent": "{{ 'a\nb' | indent(2000000000) }}",
    "replace": "{% set s = 'x' * 999999 %}{{ s.replace('x', s) }}",
    "replace filter": "{% set s = 'x' * 999999 %}{{ s | replace('x', s) }}",
    "join": "{% set s = 'x' * 999999 %}{{ range(90000) | join(s) }}",
    "join method": "{% set s = 'x' * 999999 %}{{ s.join(['', ''] * 9999) }}",
    "a list of one text": "{% set s = ['x' * 999999] * 9999 %}{{ s | join }}",
    "a list of one text as JSON": "{% set s = ['x' * 999999] * 9999 %}{{ s | tojson }}",
    "a list of one text written": "{% set s = ['x' * 999999] * 9999 %}{{ s }}",
    "sorting long texts": "{% set s = ['x' * 999998 + 'a', 'x' * 999998 + 'b'] * 99999 %}{{ s | sort | length }}",
    "plus": "{% set n = namespace(s='ab') %}{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "plus of lists": "{% set n = namespace(s=[1]) %}{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "tilde": "{% set n = namespace(s='ab') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "without a loop": "{% set a = 'ab' %}" + "{% set a = a ~ a %}" * 40,
    "slices": "{{ [1] | slice(2000000000) | list }}",
    "batches": "{{ [1] | batch(2000000000, 'x') | list }}",
    "rounding": "{{ 5 | round(-100000000) }}",
    "bytes": "{{ (5).to_bytes(2000000000, 'big') }}",
    "wordwrap": "{% set s = 'x' * 99999 %}{{ ('a ' * 99999) | wordwrap(1, wrapstring=s) }}",
    "sums of lists": "{{ ([[1] * 999] * 9999) | sum(start=[]) }}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
}


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE.keys())
def test_a_template_that_makes_too_large_a_value_is_refused(source: str) -> None:
    started_s = time.thread_time()
    with pytest.raises(RequestError, match="the model's chat template refuses these messages: it ") as caught:
        render(source)
    assert caught.value.field == "messages"
    assert time.thread_time() - started_s < 1.0


USUAL = {
    "{{ '%5.2f|%-4s|%s' % (1.5, 'a', [1]) }}": " 1.50|a   |[1]",
    "{{ '%s of %d' | format('a', 3) }}": "a of 3",
    "{{ '{:>4}|{x}'.format('a', x=123456) }}": "   a|123456",
    "{{ 'a' ~ 1 ~ none ~ [2] }}": "a1None[2]",
    "{{ 'a,b'.split(',') | join(';') }}": "a;b",
    "{{ ', '.join(['a', 'b']) }}": "a, b",
    "{{ messages | map(attribute='content') | join('|') }}": "Hi",
    "{{ 'aXb'.replace('X', '--') }}{{ 'aXb' | replace('X', '') }}": "a--bab",
    "{{ {'b': [1, {'c': none}]} | tojson }}": '{"b": [1, {"c": null}]}',
    "{{ {'b': 1} | tojson(indent=4) }}": '{\n    "b": 1\n}',
    "{{ 'a\nb' | indent(2, true) }}{{ ' x ' | trim }}{{ 'ab' | upper }}": "  a\n  bxAB",
    "{{ [3, 1, 2] | sort | first }}{{ [1, 2] | sum }}{{ 2.567 | round(1) }}": "132.6",
    "{{ [1, 2, 3] | batch(2) | list }}{{ 'abc' | center(5) }}": "[[1, 2], [3]] abc ",
    "{% macro f(name, obj='x') %}{{ name }}{{ obj }}{% endmacro %}{{ f(name='a', obj='b') }}": "ab",
    "{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}in{% endcall %}": "<in>",
    "{% for a in [1, [2, [3]]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}": "123",
    "{% for a in range(5) if a is odd %}{{ loop.index }}{{ a }}{% else %}none{% endfor %}": "1123",
    "{% filter upper %}a{% endfilter %}{{ 7 + 3 }}{{ 7 % 3 }}{{ 'a' + 'b' }}{{ [1] + [2] }}": "A101ab[1, 2]",
    "{% set n = namespace(a=0) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }}": "1",
    "{{ nothing }}{{ nothing | default('x') }}{{ messages | length }}": "x1",
}


@pytest.mark.parametrize(("source", "text"), USUAL.items())
def test_features_that_templates_use_still_work(source: str, text: str) -> None:
    assert render(source) == text


def test_values_are_counted_as_they_would_be_written() -> None:
    assert weight(["ab", {"c": "def"}, 5, None], 99) == 4 + 2 + (1 + 1 + 3) + 1 + 1  # list, ab, object, 5, None
    assert weight(["x" * 10] * 1000, 99) > 99


def test_constants_are_bounded_while_a_template_is_compiled() -> None:
    started_s = time.thread_time()
    for source in (LARGE["percent"], LARGE["center"], "{{ 'x' * 99999999999 }}"):
        ChatTemplate(source, {})
    assert time.thread_time() - started_s < 1.0
    with pytest.raises(ModelError, match="No filter named 'xmlattr'"):
        ChatTemplate("{{ {} | xmlattr }}", {})


def test_the_longest_time_ends_in_the_users_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.1)
    with pytest.raises(RequestError, match=r"refuses these messages: it has computed for more than 0\.1 s"):
        render(LOOPS["loops over a kept range"], cpu_s=0.1)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front")) as front:
        yield front


def test_a_slow_template_moves_out_of_the_loop_and_still_works(
    front: FrontUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "CPU_S_IN_LOOP", 0.0)  # the clock is read at every eighth iteration or call
    template = ChatTemplate("{% for a in range(passes) %}{% endfor %}{{ messages[0].content }}", {})

    def use() -> None:
        text = front.service.text
        assert text is not None
        object.__setattr__(text, "template", template)

    front.do(use)
    assert front.chat(chat_template_kwargs={"passes": 6}).status_code == 200
    assert not template.is_slow
    assert front.chat(chat_template_kwargs={"passes": 8}).status_code == 200
    assert template.is_slow
    refused = front.chat(chat_template_kwargs={"passes": 200000})
    assert refused.status_code == 400
    assert "the model's chat template refuses these messages: it loops over" in refused.json()["error"]["message"]


def test_a_template_is_not_slow_for_ever(front: FrontUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "CPU_S_IN_LOOP", 0.0)
    monkeypatch.setattr(chat_template, "RENDERINGS_AS_SLOW", 2)
    template = ChatTemplate("{% for a in range(passes) %}{% endfor %}{{ messages[0].content }}", {})
    front.do(lambda: object.__setattr__(front.service.text, "template", template))
    slow = []
    for passes in (8, 6, 6, 6, 8):
        assert front.chat(chat_template_kwargs={"passes": passes}).status_code == 200
        slow.append(template.is_slow)
    assert slow == [True, True, False, False, True]
