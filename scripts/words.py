"""Says where the code's words are not what they should be: one class a name, plain descriptions, verbs and nouns.

python scripts/words.py [FOLDER ...]    # every place below these folders, src/frostline by default; exits with 1 if any
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "frostline"


def _words(text):
    return frozenset(text.split())


# A description begins with a noun, a verb, an article or a number, so that it is understood alone. What begins with a
# word of these classes is the end of a sentence whose beginning the reader has to find; quantifiers are numbers.
PREPOSITIONS = _words(
    "about above across after against along among around as at before behind below beneath beside besides "
    "between beyond by despite down during except for from in inside into like near of off on onto out "
    "outside over per since than through till to toward towards under until unlike up upon via with within "
    "without"
)
CONJUNCTIONS = _words(
    "although and because but if lest nor or once so though unless when whenever where whereas wherever "
    "whether while yet"
)
PRONOUNS = _words(
    "everybody everyone everything he her him his how i it its likewise me my nobody nothing our she somebody "
    "someone something such that their theirs them these they this those us we what whatever which whichever "
    "who whoever whom whose why you your"
)
ADVERBS = _words(
    "again ago ahead almost alone already also altogether always anew apart away elsewhere else enough even "
    "ever far here hence how instead just later maybe meanwhile most mostly much never not now often only "
    "perhaps quite rather seldom soon still then there together too twice usually very well"
)
ADJECTIVES = _words(
    "able absent absolute canonical dotted free further greatest largest later least longest monotonic quick "
    "real relative shortest smallest"
)
# Participles that do not end in -ed; a word that does is one, but for these nouns and verbs.
PARTICIPLES = _words(
    "asked begun built done drawn found given held kept known laid left lent lost made meant met sent shown "
    "sold taken told understood written"
)
# A verb without a subject, "gives the rows", leaves open what gives them: a function, a clock, a reader. Words that are
# nouns as well ("reads", "counts") are verbs where one of ``OBJECTS`` follows.
THIRD_PERSON = _words(
    "admits allows asks becomes begins brings builds chooses closes computes contains creates deals decides decodes "
    "describes divides does ends finds fits frees gets gives goes hands has holds inspects is keeps knows lends lets "
    "makes maps may needs provides puts refuses releases resolves returns says sees serves sets stops takes tells "
    "tokenizes tries uses waits writes yields"
)
OBJECTS = _words("an any each every how it its the their them this what whether")
# Sentences of an error that have their subject with them.
WHOLE = {"there are", "there is", "too many", "this machine", "this node", "this process", "this side"}
IN_ED = {"bed", "embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "thread", "weed"}
FRAGMENTS = PREPOSITIONS | CONJUNCTIONS | PRONOUNS | ADVERBS | ADJECTIVES | PARTICIPLES
# What a function gives or does is named: "Of a row." and "It has its turn." leave open what is, and who has.
OPEN = PREPOSITIONS | _words("it its none that their theirs they those")
# A function is a verb or a noun. These have no noun behind them, so that they say no more than that something is over
# or how it is: ``known``, ``finished``, ``silent``. Names that Python's own protocols and NumPy have given stay.
BARE = (
    PARTICIPLES
    | ADJECTIVES
    | _words(
        "away became began begun best better brief came chosen cut dead empty fed flat full gone here idle "
        "likely nearest new next nowhere own pending plain portable present quiet random ready resident "
        "silent single stuck took torn uncut unequipped unknown unreadable unsaved whole worst"
    )
)
FOREIGN = {"cut", "empty", "full", "next", "readable", "seekable", "writable"}
BANNED = re.compile(r"\b_?(most|least|fewest)_(?!common\b)[a-z_]+", re.IGNORECASE)
_HEADINGS = ("Args:", "Attributes:", "Raises:", "Returns:")
_ITEM = re.compile(r"(?P<indent> *)(?P<name>\*{0,2}\w[\w., *]*): (?P<first>\w*)(?: (?P<second>\w*))?(?P<rest>.*)")


def descriptions(docstring):
    """The descriptions of arguments, attributes, errors and what is returned: line, name, first and second word."""
    indent, heading = None, ""
    for number, line in enumerate(docstring.split("\n")):
        if line.strip() in _HEADINGS:
            indent, heading = len(line) - len(line.lstrip()) + 4, line.strip()
        elif line.strip() and indent is not None and len(line) - len(line.lstrip()) < indent:
            indent = None
        elif indent is not None and heading == "Returns:":
            first, second, *_ = [*re.findall(r"\w+", line), "", ""]
            yield number, "what is returned", first, second
            indent = None
        elif indent is not None and (item := _ITEM.fullmatch(line)) and len(item["indent"]) == indent:
            yield number, item["name"], item["first"], item["second"] or ""


def docstrings(tree):
    """Every docstring of a module: its first line's number and its text, indented as it is written."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            yield node.body[0].lineno, node.body[0].value.value


def is_fragment(word, following=""):
    """Whether a description that begins with these words, in small letters, lacks the noun that it is about."""
    if f"{word} {following}" in WHOLE:
        return False
    has_no_subject = word in THIRD_PERSON or (word.endswith("s") and following in OBJECTS)
    return word in FRAGMENTS or has_no_subject or (word.endswith("ed") and word not in IN_ED)


def is_bare(name):
    """Whether a function's name is a participle or an adjective by itself, or one with ``by`` or ``of`` behind it."""
    first, _, rest = name.partition("_")
    if rest not in ("", "as", "at", "by", "for", "from", "here", "in", "of", "on", "to", "with", "within"):
        return False
    return first not in FOREIGN and (first in BARE or (first.endswith("ed") and first not in IN_ED))


def functions(tree):
    """Public functions and methods whose names are bare; no properties, nor what is in private classes."""
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from functions(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_bare(node.name):
            decorators = " ".join(ast.unparse(item) for item in node.decorator_list)
            if "property" not in decorators and "fixture" not in decorators:
                yield node.lineno, f"the function {node.name} is a bare participle or adjective: a verb or a noun"


def public(tree):
    """Public functions, methods and properties; nothing of private classes."""
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node


def summaries(tree):
    """Public functions whose docstring begins without what it is about; ``As `x` says`` points at where that stands."""
    for node in public(tree):
        words = (ast.get_docstring(node) or "").split()[:2]
        first = re.sub(r"\W", "", words[0].lower()) if words else ""
        if first in OPEN and not (first == "as" and words[1].startswith("`")):
            yield node.lineno, f"the summary of {node.name} begins with {words[0]!r}"


def parameters(tree):
    """Parameters that say nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.arg == "one":
            yield node.lineno, "a parameter is called 'one': call it what it is"


def fragments(tree):
    """Descriptions that are fragments, and how many descriptions there are."""
    found, count = [], 0
    for start, text in docstrings(tree):
        for number, name, first, second in descriptions(text):
            count += 1
            if is_fragment(first.lower(), second.lower()):
                found.append((start + number, f"the description of {name} begins with {first!r}"))
    return found, count


def loops(tree):
    """Loop variables that say nothing."""
    for node in ast.walk(tree):
        targets = [node.target] if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension) else []
        for target in targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name) and name.id == "one":
                    yield name.lineno, "a loop variable is called 'one': call it what it holds"


def modules(folders=(SOURCE,)):
    """Path, text and tree of every module."""
    for folder in folders:
        for path in sorted(Path(folder).resolve().rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            yield path, text, ast.parse(text)


def repeated_classes():
    """Public classes whose name another one has."""
    places = defaultdict(list)
    for path, _, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return {name: found for name, found in places.items() if len(found) > 1}


def places(folders=(SOURCE,)):
    """Every place with words that should be others: path, line and why; and how many descriptions there are."""
    found, count = [], 0
    for path, text, tree in modules(folders):
        here, descriptions_here = fragments(tree)
        here += [*loops(tree), *functions(tree), *parameters(tree), *summaries(tree)]
        here += [
            (text[: match.start()].count("\n") + 1, f"say max_ or min_ for {match[0]}")
            for match in BANNED.finditer(text)
        ]
        found += [(path, line, why) for line, why in here]
        count += descriptions_here
    return found, count


if __name__ == "__main__":
    found, count = places(sys.argv[1:] or (SOURCE,))
    for path, line, why in sorted(found):
        print(f"{path.relative_to(ROOT)}:{line}: {why}")
    for name, where in repeated_classes().items():
        print(f"{name} is the name of several classes: {', '.join(where)}")
    print(f"{sum('description' in why for _, _, why in found)} of {count} descriptions are fragments")
    sys.exit(1 if found else 0)
