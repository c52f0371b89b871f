"""The compiled conditions against a plain evaluator, over generated conditions and messages."""

from hypothesis import given
from hypothesis import strategies as st

from martlet_filter_sql92.compiler import compile_tree
from martlet_filter_sql92.like import compile_like
from martlet_filter_sql92.parser import ExpressionLimits, Node, parse

from . import reference

NAMES = ("a", "b", "c")
TEXTS = (
    "",
    "x",
    "xy",
    "true",
    "TRUE",
    "false",
    "0",
    "1",
    "5",
    "-3",
    "03",
    "2.5",
    "1e3",
    "9223372036854775808",
    " 1",
    "1_0",
    "٣",
    "nan",
    "inf",
)
names = st.sampled_from(NAMES)
strings = st.sampled_from(TEXTS) | st.text("ab%_'\\", max_size=4)
quoted = strings.map(lambda text: "'" + text.replace("'", "''") + "'")
whole = st.integers(-(2**63), 2**63 - 1).map(str)
numbers = whole | st.sampled_from(("0", "1", "5", "2.5", ".5", "1e3", "3L", "1e308"))
arithmetic = st.recursive(
    names | numbers,
    lambda inner: (
        st.tuples(inner, st.sampled_from("+-*/%"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
        | inner.map(lambda text: f"- ({text})")
    ),
    max_leaves=4,
)
maybe_not = st.sampled_from(("", "NOT "))
tests = st.one_of(
    st.tuples(arithmetic, st.sampled_from(("<", "<=", ">", ">=", "=", "<>")), arithmetic).map(" ".join),
    st.tuples(names, st.sampled_from(("=", "<>")), quoted | names | st.sampled_from(("TRUE", "FALSE"))).map(" ".join),
    st.tuples(names, st.sampled_from(("IS NULL", "IS NOT NULL"))).map(" ".join),
    st.tuples(names, maybe_not, arithmetic, arithmetic).map(lambda t: f"{t[0]} {t[1]}BETWEEN {t[2]} AND {t[3]} + 0"),
    st.tuples(names, maybe_not, st.lists(quoted, min_size=1, max_size=3)).map(
        lambda t: f"{t[0]} {t[1]}IN ({', '.join(t[2])})"
    ),
    st.tuples(names, maybe_not, quoted).map(lambda t: f"{t[0]} {t[1]}LIKE {t[2]}"),
    st.tuples(names, maybe_not, st.sampled_from(("CONTAINS", "STARTSWITH", "ENDSWITH")), quoted).map(
        lambda t: f"{t[0]} {t[1]}{t[2]} {t[3]}"
    ),
    names,
    st.sampled_from(("TRUE", "FALSE")),
)
conditions = st.recursive(
    tests,
    lambda inner: (
        st.tuples(inner, st.sampled_from(("AND", "OR")), inner).map(lambda t: f"({t[0]}) {t[1]} {t[2]}")
        | inner.map(lambda text: f"NOT ({text})")
        | inner.map(lambda text: f"({text}) = TRUE")
    ),
    max_leaves=8,
)
messages = st.dictionaries(names, strings | numbers, max_size=3)


class Values(dict[str, str]):
    def property(self, name: str) -> str | None:
        return self.get(name)


def both(tree: Node, values: dict[str, str]) -> tuple[bool | None, bool | None]:
    return compile_tree(tree)(Values(values)), reference.condition(tree, values)


@given(conditions, st.lists(messages, min_size=1, max_size=5))
def test_a_compiled_condition_says_what_the_rules_say(text: str, found: list[dict[str, str]]) -> None:
    tree = parse(text, ExpressionLimits(1 << 20, 1 << 10, 1 << 20))
    for values in found:
        compiled, plain = both(tree, values)
        assert compiled is plain, (text, values)


@given(st.text("ab%_\\", max_size=8), st.text("abc%_\\", max_size=12), st.sampled_from(("", "\\", "a")))
def test_like_finds_what_trying_everything_finds(pattern: str, text: str, escape: str) -> None:
    symbols = iter(pattern)
    if any(character == escape and next(symbols, None) is None for character in symbols):
        return  # refused by the parser
    assert compile_like(pattern, escape)(text, [1 << 20]) is reference.like(text, pattern, escape)
