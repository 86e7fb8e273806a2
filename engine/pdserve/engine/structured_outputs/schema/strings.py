"""Strings of JSON as grammars: of bounded length, of a format, and names other than some.

A string of at most N characters is a ladder of rules, one per number of characters that may follow. The rules are the same in every
grammar, so a compiler that has computed the masks of a ladder once has those of all strings of its length and below. The
closing quotation mark belongs to the ladder: a rule that ended before it would leave the tokens across its end undecided.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.engine.structured_outputs.schema.ebnf import Rules, literal, one_of
from pdserve.engine.structured_outputs.schema.patterns import Pattern

QUOTE = '"\\""'
PLAIN = '[^\\0-\\x1f"\\\\]'
"""A character that needs no escape in JSON."""
LADDER = 256
"""Longest strings that are ladders, characters. Longer ones are counted, and have no escapes."""
NAME_CHARS = 64
"""Limit of names that a schema leaves open."""
_HEX = "[A-Fa-f0-9]"
_ESCAPES = (
    '"\\\\" ["\\\\/bfnrt]',
    f'"\\\\u" [0-9A-CEFa-cef] {_HEX} {_HEX} {_HEX}',
    f'"\\\\u" [Dd] [0-7] {_HEX} {_HEX}',
)
"""Escapes that are one character each, so without surrogates."""


def any_string(rules: Rules, least: int, most: int | None) -> str:
    """A string of `least` to `most` characters. most: None for no limit."""
    if most is not None and most > LADDER:
        return rules.add(f'"\\"" {PLAIN}{{{least},{most}}} "\\""')
    tail = _free(rules) if most is None else _ladder(rules, most - least)
    for _ in range(least):
        tail = rules.add(one_of(f"{char} {tail}" for char in (PLAIN, *_ESCAPES)))
    return rules.add(f"{QUOTE} {tail}")


def _ladder(rules: Rules, most: int) -> str:
    """The rest of a string: at most `most` characters, and the quotation mark."""
    name = rules.add(QUOTE)
    for _ in range(most):
        name = rules.add(one_of((QUOTE, *(f"{char} {name}" for char in (PLAIN, *_ESCAPES)))))
    return name


def _free(rules: Rules) -> str:
    """The rest of a string of any length."""
    return rules.once("a free string", lambda own: one_of((QUOTE, *(f"{char} {own}" for char in (PLAIN, *_ESCAPES)))))


def ladder_grammar(most: int) -> str:
    """A grammar with the ladder of this length, to compute its masks."""
    rules = Rules()
    return rules.text(any_string(rules, 0, most))


def other_name(rules: Rules, names: Iterable[str]) -> str:
    """A string of at most `NAME_CHARS` characters that is none of these names."""
    return rules.add(f"{QUOTE} {_other(rules, sorted(set(names)), 0)}")


def _other(rules: Rules, names: list[str], place: int) -> str:
    """The rest of a string that begins as all these names do with their first `place` characters."""
    left = NAME_CHARS - place
    ways = [] if any(len(name) == place for name in names) else [QUOTE]
    firsts = sorted({name[place] for name in names if len(name) > place})
    for first in firsts if left else ():
        following = [name for name in names if name[place : place + 1] == first]
        # names with an escape are written without one here, so there is no other spelling of them
        if first >= " " and first not in '"\\' and not _is_surrogate(first):
            rest = _other(rules, following, place + 1)
            ways.append(f"{literal(first)} {rest}")
    if left:
        # no escape, which could spell the first character of the rest of a name
        apart = "".join(f"\\U{ord(first):08x}" for first in firsts if not _is_surrogate(first))
        ways.append(f'[^\\0-\\x1f"\\\\{apart}] {_ladder(rules, left - 1)}')
    return rules.add(one_of(ways))


def _is_surrogate(char: str) -> bool:
    return "\ud800" <= char <= "\udfff"


def regex(rules: Rules, pattern: str) -> str:
    """A string that an expression matches as a whole. Raises: NotSupported."""
    return rules.add(f"{QUOTE} {Pattern(pattern).expression} {QUOTE}")


def format_string(rules: Rules, name: str) -> str:
    """A string of this format."""
    # one automaton, whose states leave no token undecided; xgrammar's mistakes with such expressions do not concern these
    quoted = FORMATS[name].replace("\\", "\\\\").replace('"', '\\"')
    return rules.add(f'{QUOTE} Regex("{quoted}") {QUOTE}')


# ---- formats: `(|x)` in place of `(x)?`, which xgrammar takes for another expression where x ends with a repetition

_LABEL = "[A-Za-z0-9]{1,20}(|-[A-Za-z0-9]{1,20})"
_HOST = rf"{_LABEL}(|\.{_LABEL})(|\.{_LABEL})(|\.{_LABEL})"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][48]|[2468]0|[13579][26])00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP}-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](|\.[0-9]{1,9})(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_H = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    (
        f"({_H}:){{7}}({_H}|:)",
        *(f"({_H}:){{{left}}}(:{_H}){{1,{7 - left}}}" for left in range(1, 7)),
        *(f"({_H}:){{{left}}}:" for left in range(1, 7)),
        f":((:{_H}){{1,7}}|:)",
    )
)
_N = "[0-9]{1,6}"
_CLOCK = f"T({_N}H(|{_N}M(|{_N}S))|{_N}M(|{_N}S)|{_N}S)"
_DURATION = f"P({_N}W|{_CLOCK}|({_N}D|{_N}M(|{_N}D)|{_N}Y(|{_N}M(|{_N}D)))(|{_CLOCK}))"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_PATH = r"(|/[A-Za-z0-9._~/-]{0,64})(|\?[A-Za-z0-9._~=&-]{0,64})(|#[A-Za-z0-9._~-]{0,32})"
_URI = f"[a-z][a-z0-9+.-]{{1,9}}://{_HOST}(|:[0-9]{{1,4}}){_PATH}"
_POINTER = "(|/[A-Za-z0-9_.-]{0,24})(|/[A-Za-z0-9_.-]{0,24})(|/[A-Za-z0-9_.-]{0,24})"
_HEX_DIGIT = "[0-9A-Fa-f]"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": rf"{_ATOM}(|\.{_ATOM})@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": _IPV6,
    "uuid": "-".join(f"{_HEX_DIGIT}{{{count}}}" for count in (8, 4, 4, 4, 12)),
    "uri": _URI,
    "uri-reference": f"({_URI}|{_PATH})",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]?)(#|{_POINTER})",
}
"""Expressions of formats. Each is a part of what the format allows: parts of bounded length, and only real dates."""
