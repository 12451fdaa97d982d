"""Nodes to attrs classes: what each annotation accepts, and every sentence of a refusal in full."""

from __future__ import annotations

import enum
import pathlib
from typing import ClassVar, Literal

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_core.config.decode import Unavailable, construct, read_keys, reader, settings, validate
from kvtier_core.config.yaml_nodes import ProblemCollector, from_file, from_plain, from_yaml
from kvtier_core.errors import ConfigError, ContractError
from kvtier_core.interfaces import ArenaConfig, EvictionConfig
from kvtier_core.policies.lru import LruConfig
from kvtier_core.types import Nbytes, Seconds


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@attrs.frozen
class SmallConfig(EvictionConfig):
    type: ClassVar[str] = "small"
    share: int = attrs.field(validator=attrs.validators.ge(1))

    def open(self):
        raise NotImplementedError


@attrs.frozen
class Everything:
    text: str = "t"
    number: int = 1
    flag: bool = False
    ratio: float = 0.5
    size: Nbytes = attrs.field(default=Nbytes(1))
    wait: Seconds = attrs.field(default=Seconds(1))
    path: pathlib.Path = pathlib.Path("/")
    maybe: int | None = 3
    budget: int | Literal["auto", "none"] = "auto"
    share: Literal["all"] | float | None = "all"
    mode: Literal["auto", "on", "off"] = "auto"
    level: Literal[1, 2] = 1
    colour: Colour = Colour.RED
    hosts: tuple[str, ...] = ()
    policy: EvictionConfig = attrs.field(factory=LruConfig)
    arena: ArenaConfig | None = None


def choose(family, name):
    configs = {"lru": LruConfig, "small": SmallConfig}
    return configs.get(name) or Unavailable(f"no '{name}'", "take another")


def read(node, cls, collector):
    with collector:
        values = read_keys(node, settings(cls), choose, collector)
        validate(cls, node, values, collector)
    collector.raise_if_any()
    return construct(cls, node, values)


def of_yaml(text, cls=Everything):
    collector = ProblemCollector()
    return read(from_yaml(text, "f.yaml", collector), cls, collector)


def of_plain(value, cls=Everything):
    collector = ProblemCollector()
    return read(from_plain(value, "inline", collector), cls, collector)


def complaint(read, what, *args):
    with pytest.raises(ConfigError) as caught:
        read(what, *args)
    return str(caught.value)


@pytest.mark.parametrize(
    ("written", "field", "value"),
    [
        ("text: hello", "text", "hello"),
        ("text: 012", "text", "012"),
        ("text: no", "text", "no"),
        ('text: "null"', "text", "null"),
        ("number: -7", "number", -7),
        ("flag: yes", "flag", True),
        ("flag: Off", "flag", False),
        ("ratio: 1", "ratio", 1.0),
        ("ratio: .5e1", "ratio", 5.0),
        ("size: 8GiB", "size", Nbytes(8 << 30)),
        ("wait: 500ms", "wait", Seconds(0.5)),
        ("path: /a/b", "path", pathlib.Path("/a/b")),
        ("path: ~/b", "path", pathlib.Path.home() / "b"),
        ("maybe: ~", "maybe", None),
        ("maybe:", "maybe", None),
        ("maybe: 4", "maybe", 4),
        ("budget: 5", "budget", 5),
        ("budget: none", "budget", "none"),
        ('budget: "auto"', "budget", "auto"),
        ("share: 0.5", "share", 0.5),
        ("share: all", "share", "all"),
        ("share: ~", "share", None),
        ("mode: on", "mode", "on"),
        ("mode: off", "mode", "off"),
        ('mode: "off"', "mode", "off"),
        ("level: 2", "level", 2),
        ("colour: blue", "colour", Colour.BLUE),
        ("hosts: [a, 1]", "hosts", ("a", "1")),
        ("policy: lru", "policy", LruConfig()),
        ("policy: {type: small, share: 5}", "policy", SmallConfig(5)),
    ],
)
def test_yaml_is_read_as_the_field_says(written, field, value):
    assert getattr(of_yaml(written), field) == value


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"text": "hello"}, "hello"),
        ({"number": 7}, 7),
        ({"flag": True}, True),
        ({"ratio": 2}, 2.0),
        ({"size": "8GiB"}, Nbytes(8 << 30)),
        ({"size": Nbytes(8 << 30)}, Nbytes(8 << 30)),
        ({"wait": "2s"}, Seconds(2)),
        ({"maybe": None}, None),
        ({"budget": 5}, 5),
        ({"budget": "none"}, "none"),
        ({"mode": "on"}, "on"),
        ({"level": 2}, 2),
        ({"hosts": ["a", "b"]}, ("a", "b")),
        ({"policy": {"type": "small", "share": 5}}, SmallConfig(5)),
    ],
)
def test_plain_values_are_read_as_the_field_says(given, value):
    assert getattr(of_plain(given), next(iter(given))) == value


SIZE = "is not a size; write a whole number and B, KiB, MiB, GiB, TiB or PiB"


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("text: [a]", "f.yaml:1: $.text: expected text, found a list"),
        ("text:", "f.yaml:1: $.text: expected text, found nothing"),
        ('number: "7"', "f.yaml:1: $.number: expected a whole number, found '7'"),
        ("number: 1:30", "f.yaml:1: $.number: expected a whole number, found '1:30'"),
        ("number: 010", "f.yaml:1: $.number: expected a whole number, found '010'"),
        ("number: 1.5", "f.yaml:1: $.number: expected a whole number, found '1.5'"),
        ("budget: 1.5", "f.yaml:1: $.budget: expected a whole number or 'auto' or 'none', found '1.5'"),
        (
            "budget: aut",
            "f.yaml:1: $.budget: expected a whole number or 'auto' or 'none', found 'aut'; did you mean 'auto'?",
        ),
        ("budget: []", "f.yaml:1: $.budget: expected a whole number or 'auto' or 'none', found a list"),
        ("budget:", "f.yaml:1: $.budget: expected a whole number or 'auto' or 'none', found nothing"),
        ("share: x", "f.yaml:1: $.share: expected a number or 'all', found 'x'"),
        ("flag: 1", "f.yaml:1: $.flag: expected true or false, found '1'"),
        ("ratio: nan", "f.yaml:1: $.ratio: expected a number, found 'nan'"),
        ("size: 500GB", f"f.yaml:1: $.size: '500GB' {SIZE}"),
        ("size: 500", f"f.yaml:1: $.size: '500' {SIZE}"),
        ("size:", "f.yaml:1: $.size: expected a single value, found nothing"),
        ("wait: 2", "f.yaml:1: $.wait: '2' is not a duration; write a number and ms, s or min"),
        ('path: ""', "f.yaml:1: $.path: '' is not a path"),
        ('path: "a\\0"', "f.yaml:1: $.path: 'a\\x00' is not a path"),
        (
            "path: ~nobody-here/b",
            "f.yaml:1: $.path: '~nobody-here/b' is not a path: Could not determine home directory.",
        ),
        ("arena: lru", "f.yaml:1: $.arena: expected ArenaConfig, found 'lru'"),
        ("mode: of", "f.yaml:1: $.mode: 'of' is not one of auto, on, off; did you mean 'off'?"),
        ("mode: {}", "f.yaml:1: $.mode: expected a single value, found a mapping"),
        ("colour: green", "f.yaml:1: $.colour: 'green' is not one of red, blue"),
        ("hosts: a", "f.yaml:1: $.hosts: expected a list, found 'a'"),
        ("policy: lfu", "f.yaml:1: $.policy: no 'lfu'; take another"),
        ("policy: small", "f.yaml:1: $.policy: 'share' is missing"),
        ("policy: {share: 1}", "f.yaml:1: $.policy: 'type' is missing"),
        ("policy: [lru]", "f.yaml:1: $.policy: expected text, found a list"),
        ("policy: {type: small, share: 0}", "f.yaml:1: $.policy.share: 'share' must be >= 1: 0"),
        (
            "policy: {type: small, shar: 1, share: 1}",
            "f.yaml:1: $.policy.shar: unknown key 'shar'; did you mean 'share'?",
        ),
        ("a b: 1", "f.yaml:1: $[\"a b\"]: unknown key 'a b'; known keys: " + ", ".join(settings(Everything))),
    ],
)
def test_errors_in_yaml(written, sentence):
    assert complaint(of_yaml, written) == sentence


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"mode": True}, "inline: $.mode: true is not one of auto, on, off"),
        ({"number": True}, "inline: $.number: expected a whole number, found true"),
        ({"number": "7"}, "inline: $.number: expected a whole number, found '7'"),
        ({"budget": True}, "inline: $.budget: expected a whole number or 'auto' or 'none', found true"),
        ({"budget": "7"}, "inline: $.budget: expected a whole number or 'auto' or 'none', found '7'"),
        ({"flag": "true"}, "inline: $.flag: expected true or false, found 'true'"),
        ({"text": 7}, "inline: $.text: expected text, found 7"),
        ({"size": 500}, f"inline: $.size: '500' {SIZE}"),
        ({"hosts": [1]}, "inline: $.hosts[0]: expected text, found 1"),
        ({"text": b"7"}, "inline: $.text: a setting cannot be a bytes"),
        ({1: 2}, "inline: $: a key must be text, not 1; put it in quotes"),
        ({"policy": []}, "inline: $.policy: expected text, found a list"),
        ([], "inline: $: expected a mapping, found a list"),
    ],
)
def test_errors_in_plain_values(given, sentence):
    assert complaint(of_plain, given) == sentence


def test_all_problems_are_reported_at_their_lines():
    written = """\
number: x
size: 1GB
sise: 2
number: 4
hosts:
  - []
  - ok
  - {}
"""
    assert complaint(of_yaml, written).splitlines() == [
        "f.yaml:1: $.number: expected a whole number, found 'x'",
        f"f.yaml:2: $.size: '1GB' {SIZE}",
        "f.yaml:3: $.sise: unknown key 'sise'; did you mean 'size'?",
        "f.yaml:4: $.number: written twice, first at f.yaml:1",
        "f.yaml:6: $.hosts[0]: expected text, found a list",
        "f.yaml:8: $.hosts[2]: expected text, found a mapping",
    ]


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("", "f.yaml:1: $: the file is empty; write version: 1 and tiers"),
        ("# nothing\n", "f.yaml:1: $: the file is empty; write version: 1 and tiers"),
        ("text: &a x", "f.yaml:1: $: anchors and aliases are not allowed"),
        ("a: 1\ntext: *a", "f.yaml:2: $: anchors and aliases are not allowed"),
        ("text: !!python/name:os.system x", "f.yaml:1: $: tags are not allowed"),
        ("text: !!str x", "f.yaml:1: $: tags are not allowed"),
        ("<<: {text: a}", 'f.yaml:1: $["<<"]: merge keys are not allowed; write the settings out'),
        ("? [a]\n: b", "f.yaml:1: $: a key must be text; write a name and a colon"),
        ("a: " + "[" * 100_000, "f.yaml:1: $: nested too deeply"),
        ("text: 'a\n\nb: c", "f.yaml:3: $: while scanning a quoted scalar, found unexpected end of stream"),
        ("a: 1\n--- \nb: 1", "f.yaml:2: $: expected a single document in the stream, but found another document"),
        ("a: b\nc: \0", "f.yaml:2: $: character 0x0 is not allowed"),
        ("a:\n\t- b", "f.yaml:2: $: a tab starts a value or a line; indent YAML with spaces"),
        ('text: "\\U00110000"', "f.yaml: $: not YAML: chr() arg not in range(0x110000)"),
        ("just text", "f.yaml:1: $: expected a mapping, found 'just text'"),
        ("- 1", "f.yaml:1: $: expected a mapping, found a list"),
    ],
)
def test_a_missing_file(written, sentence):
    assert complaint(of_yaml, written) == sentence


def test_deep_and_endless_values_are_refused():
    endless: list = []
    endless.append(endless)
    assert complaint(of_plain, {"number": 1, "text": endless}).splitlines() == [
        f"inline: $.text{'[0]' * 16}: nested too deeply",
        "inline: $.text: expected text, found a list",
    ]


def test_files_that_cannot_be_read(tmp_path):
    missing = tmp_path / "missing.yaml"
    assert (
        complaint(from_file, missing, ProblemCollector()) == f"{missing}: $: cannot be read: No such file or directory"
    )
    assert complaint(from_file, tmp_path, ProblemCollector()) == f"{tmp_path}: $: cannot be read: Is a directory"
    nowhere = pathlib.Path("~nobody-here/kvtier.yaml")
    why = f"'{nowhere}' is not a path: Could not determine home directory."
    assert complaint(from_file, nowhere, ProblemCollector()) == f"{nowhere}: $: cannot be read: {why}"
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"text: caf\xe9")
    assert complaint(from_file, latin, ProblemCollector()) == (
        f"{latin}: $: cannot be read: 'utf-8' codec can't decode byte 0xe9 in position 9: unexpected end of data"
    )


@attrs.frozen
class Pair:
    low: int = 0
    high: int = attrs.field(default=10)
    even: int = attrs.field(default=0, validator=attrs.validators.instance_of(int))

    @high.validator
    def _above_low(self, attribute, value):
        if value < self.low:
            raise ValueError("high lies below low")

    @even.validator
    def _is_even(self, attribute, value):
        if value % 2:
            raise ValueError

    def __attrs_post_init__(self):
        if self.low < 0:
            raise ValueError("low lies below zero")


def test_validators_speak_at_their_own_key():
    assert complaint(of_yaml, "even: 1\nlow: 5\nhigh: 4", Pair).splitlines() == [
        "f.yaml:1: $.even: ValueError",
        "f.yaml:3: $.high: high lies below low",
    ]
    assert complaint(of_yaml, "low: -1", Pair) == "f.yaml:1: $: low lies below zero"
    assert of_yaml("low: 3", Pair) == Pair(3)


@pytest.mark.parametrize(
    "annotation", [complex, int | str, int | float, int | Literal[0], str | Literal["auto"] | None], ids=str
)
def test_a_type_that_no_setting_can_have(annotation):
    with pytest.raises(ContractError) as caught:
        reader(annotation)
    assert str(caught.value) == f"a setting cannot have type {annotation}"


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda below: st.lists(below) | st.dictionaries(st.text() | st.sampled_from(list(settings(Everything))), below),
)


@given(plain)
def test_any_input_is_read_or_refused(value):
    try:
        assert isinstance(of_plain(value), Everything)
    except ConfigError as error:
        assert error.problems
